"""Every implementation on every ci case, against float64 numpy and against `reference`."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_kernels._core.testing import TOLERANCES, check_against_reference, check_close, pairs, tagged
from pallas_kernels.ragged_paged_attention import api, cases
from tests.pallas_kernels import harness

CI = tagged(cases.CASES, "ci")
name = lambda x: x if isinstance(x, str) else x.name  # noqa: E731


def served(of):
    """Each case with each implementation that takes its kind of cache. What the others say is tested with dispatch."""
    return [
        pytest.param(i, case, marks=harness.needs_native if i == "native" else ())
        for i, case in pairs(api.IMPLEMENTATIONS, of)
        if i != "native" or (case.scales is None and "float16" not in (case.q_dtype, case.kv_dtype))
    ]


@pytest.mark.parametrize(("implementation", "case"), served(CI), ids=name)
def test_matches_float64_and_writes_exactly(implementation, case):
    check_against_float64(implementation, case)


@pytest.mark.slow
@pytest.mark.parametrize(("implementation", "case"), served(tagged(cases.CASES, "full")), ids=name)
def test_matches_float64_on_the_full_set(implementation, case):
    check_against_float64(implementation, case)


def check_against_float64(implementation, case):
    out, keys, values = harness.run(case, implementation)
    want, want_keys, want_values = harness.expected(case)
    check_close(out, want, TOLERANCES[case.q_dtype], case.name)
    assert out.dtype == case.q_dtype
    for got, right in ((keys, want_keys), (values, want_values)):
        # All pages but the null page, and the last page, which is no one's, above all.
        np.testing.assert_array_equal(got[:, 1:].astype(np.float64), right[:, 1:])


@pytest.mark.parametrize("case", CI, ids=name)
def test_xla_agrees_with_reference(case):
    def call(implementation):
        out, keys, values = harness.run(case, implementation)
        return out, np.stack([keys, values])[:, :, 1:]

    check_against_reference(call, "xla", case)


@pytest.mark.parametrize("implementation", [harness.NATIVE, "xla", "reference"])
def test_padding_tokens_give_zeros(implementation):
    case = CI[0]
    out, _, _ = harness.run(case, implementation)
    assert case.pad_tokens > 0
    assert (out[-case.pad_tokens :] == 0).all()
