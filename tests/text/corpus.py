"""Text that tokenizers get wrong: twenty scripts, joined emoji, odd spaces, numbers, code."""

from __future__ import annotations

SCRIPTS = [
    "The quick brown fox jumps over the lazy dog.",
    "Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "אכול נחש בצל גזר",
    "نص حكيم له سر قاطع وذو شأن عظيم",
    "ऋषियों को सताने वाले दुष्ट राक्षसों",
    "বাংলা ভাষা একটি মধুর ভাষা",
    "தமிழ் மொழி மிகவும் பழமையானது",
    "తెలుగు భాష చాలా తీయనిది",
    "ಕನ್ನಡ ನುಡಿ ಸೊಗಸು",
    "മലയാളം എന്റെ ഭാഷയാണ്",
    "ភាសាខ្មែរ ស្រស់ស្អាត",
    "ภาษาไทยไม่มีช่องว่างระหว่างคำ",
    "ພາສາລາວ ງາມ",
    "မြန်မာဘာသာ",
    "ქართული ენა ძალიან ლამაზია",
    "Հայերենը շատ հին լեզու է",
    "አማርኛ ቋንቋ",
    "いろはにほへと ちりぬるを、色は匂へど。",
    "天地玄黃，宇宙洪荒。日月盈昃",
    "키스의 고유조건은 입술끼리 만나야 하고",
]
ODDITIES = [
    "",
    " ",
    "   leading and trailing   ",
    "tabs\tand\r\nnewlines\n\n\n  indented\n",
    "👨‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 skin, 🇨🇿 country",
    "combining: e\u0301 n\u0303 \u1100\u1161\u11a8; composed: é ñ 각",
    "zero\u200bwidth\u00a0nbsp\u2028separator\ufeffbom",
    "don't I'll we've THEY'RE it's'S",
    "1 22 333 4444 55555 3.14159 1,000,000 0x1F",
    "numerals: ١٢٣ Ⅷ ½ ④ 一二三",
    "def f(x):\n    return {'a': [1, 2], \"b\": x ** 2}  # note\n",
    "https://example.org/a?b=c&d=%20e#f <tag attr='1'/> $x_{i}^{2}$ C:\\dir\\file",
    "▁literal ▁ underscore Ġ and Ċ and <0x41>",
    "ﬁ ligature, ǅ title case, ſ long s, İ dotted",
    "\U0001d504\U0001d505 math, 𠜎𠜱 rare han, \U000e0001 tag",
    "!!!???...---===***///\\\\\\",
    "a" * 300,
]
CORPUS = SCRIPTS + ODDITIES
