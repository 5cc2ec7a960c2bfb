"""KernelSource: the one door through which generated text becomes a kernel.

Text with an unordered accumulation is refused by a closed table per language. The derivation of
numerics makes such text rarely possible; this guards the choke point.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tilewright.graph.errors import LowerError

_UNORDERED = "an atomic has no fixed order of accumulation"
_APPROXIMATE = "an approximation has the chip's own bits"
_ARGUMENTS_ALONE = "a kernel depends on its arguments alone"
_C_LIBRARY = r"(?<![\w:.])(?:std::)?(expf?|logf?|tanhf?|erff?|sinf?|cosf?|powf?)\s*\("
FORBIDDEN: Mapping[str, tuple[tuple[str, str], ...]] = {
    "cpp": (
        (r"std\s*::\s*atomic", "an atomic has no fixed order of accumulation"),
        (r"\batomic_\w+", "an atomic has no fixed order of accumulation"),
        (r"__atomic_\w+|__sync_\w+", "an atomic has no fixed order of accumulation"),
        (r"\bfetch_(add|sub|or|and|xor)\b", "an atomic has no fixed order of accumulation"),
        (r"#\s*pragma\s+omp", "OpenMP decides the order of a reduction by the number of threads"),
        (r"\breduction\s*\(", "a compiler's reduction has no fixed order"),
        (r"std\s*::\s*(reduce|transform_reduce|execution)", "its order of evaluation is not fixed"),
        (r"\b(rand|srand|time|clock)\s*\(", "a kernel depends on its arguments alone"),
        (
            r"\bthread_id\b\s*[-+*/%]=?\s*\w|\btw_num_threads\s*\(\)\s*[-+*/%]",
            "arithmetic on the thread would let bits depend on the number of threads",
        ),
        (
            r"(?<![\w:])(?:std::)?(expf?|logf?|tanhf?|erff?|sinf?|cosf?|powf?)\s*\(",
            "the C library's functions differ between machines: use those of tw_math.h",
        ),
        (r"fast[-_]math|associative[-_]math|FP_CONTRACT\s+ON", "the compiler may reorder sums"),
    ),
    "triton": (
        (r"\batomic_\w+", "an atomic has no fixed order of accumulation"),
        (r"\bautotune\b|\bheuristics\b", "schedules are chosen by the tuner, by name"),
        (r"\btl\s*\.\s*rand\w*|\bphilox\b", "a kernel depends on its arguments alone"),
        (r"\binline_asm\w*", "what it computes cannot be checked here"),
        (
            r"\btl\.(?:math\.)?(exp2?|log2?|sin|cos|erf|rsqrt|sqrt|sigmoid|softmax|fdiv)\s*\(",
            "its bits are the compiler's: use the functions of tw_math",
        ),
        (r"\btl\.sum\s*\((?!tl\.reshape\()", "its order is the compiler's: use the fixed tree"),
        (r"\btl\.(cumsum|cumprod|associative_scan|histogram)\b", "its order is not fixed"),
        (r"\bclock\w*\s*\(|\bglobaltimer\b", "a kernel depends on its arguments alone"),
        (r"allow_tf32|tf32", "the precision of a product is part of the numerics"),
        (r"fp_fusion\W+True", "contraction is explicit: want enable_fp_fusion off"),
    ),
    "cuda": (
        (r"\batomic\w*|\bfetch_(add|sub|or|and|xor)\b|\b(?:red|atom)\.", _UNORDERED),
        (r"\basm\b", "what it computes cannot be checked here: use the functions of tw_hopper"),
        (r"\bcurand\w*|\b(rand|clock|clock64|globaltimer)\s*\(", _ARGUMENTS_ALONE),
        (_C_LIBRARY, "its bits are the compiler's: use the functions of tw_math"),
        (r"\b__(?:exp|log|sin|cos|tan|pow|fdivide)\w*\s*\(|\brsqrtf?\s*\(", _APPROXIMATE),
        (r"use_fast_math|fmad\W+true", "contraction is explicit: want -fmad=false"),
    ),
    "ascendc": (
        (r"\basc_set_atomic_(?!none)\w+|\basc_atomic_\w+|\bSetAtomic\w*", _UNORDERED),
        (r"std\s*::\s*atomic|\batomic_\w+|__atomic_\w+|__sync_\w+", _UNORDERED),
        (r"\basc_reduce_add\s*\(", "the order of the hardware's sum is not documented"),
        (r"\b(rand|srand|time|clock)\s*\(|\basc_get_system_\w+", _ARGUMENTS_ALONE),
        (_C_LIBRARY, "its bits are the compiler's: use the functions of tw_ascend_math.h"),
        (r"fast[-_]math|associative[-_]math|FP_CONTRACT\s+ON", "the compiler may reorder sums"),
    ),
    "tilelang": (
        (r"\batomic_\w+|\bfetch_\w+", _UNORDERED),
        (
            r"\bT\s*\.\s*(reduce_\w+|cumsum|finalize_reducer|alloc_reducer|warp_reduce\w*)\b",
            "its order is the compiler's",
        ),
        (r"\bT\s*\.\s*rng_\w+|\bphilox\w*|\bclock\w*", _ARGUMENTS_ALONE),
        (
            r"\bT\s*\.\s*(__\w+|exp\w*|log\w*|sin|cos|tanh|erf|rsqrt|sqrt|sigmoid|fast_rcp)\s*\(",
            "its bits are the compiler's: use the functions of tw_math.cuh",
        ),
        (r"\bimport_source\b|\bprelude\s*=", "what it computes cannot be checked here"),
        (r"fast_math", "the compiler may reorder sums"),
    ),
    "tilelang_ascend": (
        (r"\batomic_\w+|\bset_atomic\w*", _UNORDERED),
        (
            r"\bT\s*\.\s*(reduce_\w+|cumsum|finalize_reducer|alloc_reducer)\b",
            "its order is the compiler's",
        ),
        (r"\bT\s*\.\s*(rng_\w+|Philox|philox)\b", _ARGUMENTS_ALONE),
        (
            r"\bT\s*\.\s*(exp2?|log2?|sin|cos|tanh|erf|rsqrt|sigmoid)\s*\(",
            "its bits are the compiler's: use the functions of tw_ascend_math.h",
        ),
        (_C_LIBRARY, "its bits are the compiler's: use the functions of tw_ascend_math.h"),
        (r"\benable_hf32\b|\bset_hf32\w*", "the precision of a product is part of the numerics"),
    ),
}
SUFFIXES: Mapping[str, str] = {
    "cpp": ".cpp",
    "triton": ".py",
    "cuda": ".cu",
    "tilelang": ".tl.py",
    "ascendc": ".asc",
    "tilelang_ascend": ".tl.py",
}


@dataclass(frozen=True)
class KernelSource:
    """Generated text of one kernel that passed the scan."""

    name: str
    language: str
    text: str

    @property
    def file_name(self) -> str:
        """Name of its file: the kernel's, with the suffix of its language."""
        return self.name + SUFFIXES[self.language]

    def __post_init__(self) -> None:
        if self.language not in FORBIDDEN:
            known = ", ".join(FORBIDDEN)
            raise LowerError(
                f"kernel '{self.name}': language '{self.language}': unknown: have {known}"
            )
        code = _CODE[self.language](self.text)
        for line_number, line in enumerate(code.splitlines(), start=1):
            for pattern, why in FORBIDDEN[self.language]:
                found = re.search(pattern, line)
                if found:
                    raise LowerError(
                        f"kernel '{self.name}': forbidden text '{found.group(0)}' in line "
                        f"{line_number}: {why}"
                    )


def _cpp_code(text: str) -> str:
    """Return the text with comments blanked, line numbers kept."""
    blank = re.sub(r"/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m.group(0)), text, flags=re.S)
    return re.sub(r"//[^\n]*", "", blank)


def _python_code(text: str) -> str:
    return re.sub(r"#[^\n]*", "", text)


_CODE: Mapping[str, Callable[[str], str]] = {
    "cpp": _cpp_code,
    "triton": _python_code,
    "cuda": _cpp_code,
    "ascendc": _cpp_code,
    "tilelang": _python_code,
    "tilelang_ascend": _python_code,
}
