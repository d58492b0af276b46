"""Lines on which tokenizers have gone wrong: digits, contractions, spaces, scripts, joined emoji, code."""

from __future__ import annotations

_WORDS = [
    "Hello, world!",
    "The quick brown fox jumps over the lazy dog.",
    "naïve café, façade, Ångström, coöperate, e\u0301te\u0301 (decomposed), été (composed)",
    "Zażółć gęślą jaźń",
    "Příliš žluťoučký kůň úpěl ďábelské ódy",
    "Falsches Üben von Xylophonmusik quält jeden größeren Zwerg",
    "Ζαφείρι δέξου πάγκαλο, βαθῶν ψυχῆς τὸ σῆμα.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю",
    "Щастям б’єш жук їх глицю в фон й ґедзь пріч",
    "נקודה קטנה של עברית עם ניקוד: שָׁלוֹם",
    "نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر",
    "مَرْحَبًا بِالعَالَمِ",
    "नमस्ते दुनिया, क्या हाल है?",
    "আমি বাংলায় গান গাই",
    "தமிழ் மொழி அழகானது",
    "ภาษาไทยไม่มีช่องว่างระหว่างคำ",
    "ພາສາລາວ",
    "မြန်မာဘာသာ",
    "ភាសាខ្មែរ",
    "ქართული ენა",
    "Հայերեն լեզու",
    "አማርኛ ቋንቋ",
    "你好,世界!今天天气怎么样?",
    "中文、日本語、한국어 mixed with English",
    "いろはにほへと ちりぬるを ワカヨタレソ ツネナラム",
    "ガギグゲゴ (full) ガギグゲゴ (half)",
    "키스의 고유조건은 입술끼리 만나야 하고",
    "한글 (decomposed jamo)",
    "𠜎𠜱𠝹𠱓𠱸𠲖𠳏 (outside the basic plane)",
    "Ｆｕｌｌ　ｗｉｄｔｈ　１２３",
    "👋🌍 hello 🚀🚀🚀",
    "👩‍👩‍👧‍👦 👨🏽‍💻 🏳️‍🌈 🇺🇳🇯🇵",
    "🫠 (U+1FAE0) 🪿 🫨",
    "☃︎ vs ☃️, ❤ vs ❤️, 1️⃣2️⃣",
    "Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢L̠ͨͧͩ͘G̴̻͈͍͔̹̑͗̎̅͛́Ǫ̵̹̻̝̳͂̌̌͘!",
    "𝕳𝖊𝖑𝖑𝖔 𝓌𝑜𝓇𝓁𝒹 ⓗⓔⓛⓛⓞ",
    "½ ¼ ² ³ ₁ ₂ Ⅷ ٣ ४ ๕ 五 ㊿",
    "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋, α ∧ ¬β = ¬(¬α ∨ β)",
    "→ ← ↑ ↓ ⇒ ⟶ ░▒▓█ ┌─┐ │",
    "“curly” ‘quotes’ — em–dash… ‹guillemets› «»",
    "€100 £50 ¥1000 ₹7 ₿0.1 ¢99",
    "zero\u200bwidth\u200cjoin\u200ders\ufeffand bom",
    "no\u00a0break\u2009thin\u3000wide\u2028line\u2029para spaces",
    "right\u202eto left\u202c marks",
    "\ufffd replacement \ufffd\ufffd",
    "private \ue000 use, noncharacter \ufdd0",
    "null \x00 bell \x07 escape \x1b[31mred\x1b[0m del \x7f",
]
_CODE = [
    "def f(x: int) -> int:\n    return x * (x - 1) if x > 0 else 1",
    "for (int i = 0; i < n; ++i) { a[i] += b[i] << 2; }",
    '\tif err != nil {\n\t\treturn fmt.Errorf("%w", err)\n\t}',
    "SELECT * FROM t WHERE a='x' AND b<>1;",
    '<html><body class="a-b">&nbsp;&#128512;</body></html>',
    '{"a": [1, 2.5e-10, null, true], "b\\n": "\\u00e9"}',
    "https://example.org/path/to?q=1&r=%20#frag",
    "user.name+tag@example.co.uk",
    "C:\\Windows\\System32\\drivers\\etc\\hosts",
    "$ curl -sSL 'http://x' | sh && echo done || exit 1",
    "snake_case camelCase PascalCase kebab-case SCREAMING_SNAKE",
    "a<b>c</b> == !x ?? y?.z::w->v=>u",
    "```python\nprint('hi')\n```",
    "# Title\n\n- item\n  - sub\n\n1. one\n2. two\n",
    "x=0x1F+0b101-0o17*1_000_000.5e+3",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<|im_start|<|im_end|>|>",
]
_DIGITS = [
    *("1", "12", "123", "1234", "12345", "123456789012345678901234567890"),
    *("3.14159", "1,000,000.00", "-42", "+7", "1e10", "2024-12-31T23:59:59Z", "192.168.0.1", "555-0100", "v1.2.3rc4"),
    *("a1b2c3", "x86_64", "3D", "2nd", "100%", "#1", "1/2", "10:30", "$5.99", "１２３", "١٢٣", "१२३"),
]
_CONTRACTIONS = [
    f"{start}{mark}{end}"
    for start, end in [("I", "m"), ("you", "re"), ("they", "ve"), ("we", "ll"), ("he", "d"), ("can", "t"), ("it", "s")]
    for mark in ["'", "’", " '", "''"]
] + ["I'M YOU'RE THEY'VE WE'LL HE'D CAN'T IT'S", "'tis 'twas rock'n'roll o'clock y'all'd've", "'s 't 're 've 'm 'll 'd"]
_SPACES = [
    f"{left}{gap}{right}"
    for left, right in [("a", "b"), ("", "b"), ("a", ""), ("1", "2"), (".", "!"), ("é", "你")]
    for gap in [" ", "  ", "   ", "\t", "\n", "\n\n", " \n ", "\r\n", " \t ", "        "]
]
_SINGLES = ["", " ", "\n", "a", "é", "你", "🫠", "ď", "\x00", "\U0010ffff", "ﷺ", "ß", "İ", "ı", "ﬁ", "K", "ς"]

LINES: list[str] = [*_WORDS, *_CODE, *_DIGITS, *_CONTRACTIONS, *_SPACES, *_SINGLES]
