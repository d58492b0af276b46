"""A folder of float32 weights as one of bfloat16, for servers that read what they compute with.

python -m scripts.bench.peer_models FROM TO
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path


def write_bfloat16(source: Path, folder: Path) -> None:
    """Copy `source` to `folder`, its weights rounded to nearest."""
    import ml_dtypes
    from safetensors.numpy import load_file, save_file

    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.name not in {"model.safetensors", "config.json"}:
            shutil.copy(file, folder / file.name)
    weights = load_file(source / "model.safetensors")
    rounded = {name: weight.astype(ml_dtypes.bfloat16) for name, weight in weights.items()}
    save_file(rounded, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}, indent=1))


if __name__ == "__main__":
    write_bfloat16(Path(sys.argv[1]), Path(sys.argv[2]))
