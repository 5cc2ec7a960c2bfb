"""Configurations of DeepSeek-V4 and V4.1: sizes, the mode of every layer, and where it reads.

Every number comes from config.json; the names are those of the released files, or of what
`transformers` writes. A setting that does not fit is an error that names its key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilewright.graph.errors import VerifyError
from tilewright.models.layers import Rope
from tilewright.models.llama import MAX_WIDTH, positive, real
from tilewright.models.llama_settings import check_fixed
from tilewright.models.record import shown
from tilewright.models.scales import FP8_BLOCKS
from tilewright.models.settings import MAX_INT, below, flag, listed, section

_QUANTISED = (
    ("quant_method", "fp8"), ("fmt", "e4m3"), ("scale_fmt", "ue8m0"),
    ("activation_scheme", "dynamic"),
)  # fmt: skip
_FIXED: Mapping[str, Any] = {
    "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "hidden_act": "silu",
    "num_key_value_heads": 1, "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip
_EXPERT_DTYPES = ("fp4", "fp8")


@dataclass(frozen=True)
class LatentSizes:
    """Attention whose keys are its values: heads, widths in elements, window in positions."""

    heads: int
    width: int
    rope_width: int
    q_rank: int
    groups: int
    o_rank: int
    window: int


@dataclass(frozen=True)
class IndexSizes:
    """Index heads, their width, and how many entries are selected."""

    heads: int
    width: int
    k: int


@dataclass(frozen=True)
class ExpertSizes:
    """Routed experts and their router; `shared` experts see every token."""

    count: int
    per_token: int
    width: int
    shared: int
    scaling: float
    limit: float
    normalise: bool
    temperature: float


@dataclass(frozen=True)
class HyperSizes:
    """Hyper-connections: streams, Sinkhorn iterations, and what is added before dividing."""

    streams: int
    iterations: int
    eps: float


@dataclass(frozen=True)
class DeepseekConfig:
    """What V4 and V4.1 share. `ratios`: positions per compressed entry of each layer, 0 for none.

    `layers` are the ones built: all, or a slice of a big model. `group` is the number of channels
    that share a scale where activations are quantised.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    layers: tuple[int, int]
    ratios: tuple[int, ...]
    attention: LatentSizes
    index: IndexSizes
    experts: ExpertSizes
    hyper: HyperSizes
    rms_norm_eps: float
    rope: Rope
    compress_rope: Rope
    max_context: int
    group: int


def read_shared(config: Mapping[str, Any], ratios: tuple[int, ...], group: int) -> DeepseekConfig:
    """Read the settings of both families; `group` is the default where no block size is given."""
    check_fixed("config", config, _FIXED)
    num_layers = positive(config, "num_hidden_layers")
    _check_covered(config, len(ratios), num_layers)
    return DeepseekConfig(
        vocab_size=positive(config, "vocab_size"),
        hidden_size=positive(config, "hidden_size"),
        num_layers=num_layers,
        layers=(0, num_layers),
        ratios=ratios[:num_layers],
        attention=_read_attention(config),
        index=IndexSizes(
            *(positive(config, f"index_{k}") for k in ("n_heads", "head_dim", "topk"))
        ),
        experts=_read_experts(config),
        hyper=HyperSizes(
            positive(config, "hc_mult", most=64),
            positive(config, "hc_sinkhorn_iters", most=1000),
            real(config, "hc_eps", 1e-6),
        ),
        rms_norm_eps=real(config, "rms_norm_eps", 1e-6),
        rope=_read_rope(config, compressed=False),
        compress_rope=_read_rope(config, compressed=True),
        max_context=positive(config, "max_position_embeddings"),
        group=_read_group(config, group),
    )


def _check_covered(config: Mapping[str, Any], count: int, num_layers: int) -> None:
    """Refuse ratios for fewer layers, or for more than layers and draft layers together."""
    drafts = config.get("num_nextn_predict_layers")
    if drafts is not None and (type(drafts) is not int or not 0 <= drafts < MAX_INT):
        want = f"an int of at least 0{below(drafts, MAX_INT)}"
        raise VerifyError(f"config 'num_nextn_predict_layers': got {shown(drafts)}, want {want}")
    most = count if drafts is None else num_layers + drafts
    if count < num_layers:
        raise VerifyError(
            f"config 'compress_ratios': does not cover the layers: got {count} ratios, "
            f"want at least {num_layers}"
        )
    if count > most:
        raise VerifyError(
            f"config 'compress_ratios': more than the layers: got {count} ratios, want "
            f"{num_layers}, or {most} with the draft layers"
        )


def read_ratios(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return `compress_ratios`, or what `transformers` writes in its place."""
    found = config.get("compress_ratios")
    if found is None and "layer_types" in config:
        rates = {"sliding_attention": 0, **section(config, "compress_rates")}
        kinds = listed(config, "layer_types", "a list of names")
        found = [_rate(rates, i, kind) for i, kind in enumerate(kinds)]
    if not isinstance(found, (list, tuple)):
        raise VerifyError(f"config 'compress_ratios': got {shown(found)}, want a list of ints")
    for layer, ratio in enumerate(found):
        if type(ratio) is not int or ratio < 0:
            raise VerifyError(
                f"config 'compress_ratios': unknown mode of layer {layer}: got {shown(ratio)}, "
                "want an int of at least 0"
            )
    return tuple(found)


def _rate(rates: Mapping[str, Any], layer: int, kind: object) -> Any:
    if not isinstance(kind, str) or kind not in rates:
        raise VerifyError(
            f"config 'layer_types': unknown mode of layer {layer}: got {shown(kind)}, "
            f"want one of {', '.join(sorted(rates))}"
        )
    return rates[str(kind)]


def read_ids(config: Mapping[str, Any], key: str, num_layers: int) -> tuple[int, ...]:
    """Return ascending layer numbers; raise VerifyError naming the key for anything else."""
    found = config.get(key)
    found = [] if found is None else found
    numbers = isinstance(found, (list, tuple)) and all(type(i) is int for i in found)
    if not numbers or list(found) != sorted({i for i in found if 0 <= i < num_layers}):
        raise VerifyError(
            f"config '{key}': got {shown(found)}, want ascending layer numbers below {num_layers}"
        )
    return tuple(found)


def _width(config: Mapping[str, Any], key: str) -> int:
    return positive(config, key, most=MAX_WIDTH)


def _read_attention(config: Mapping[str, Any]) -> LatentSizes:
    heads, width = positive(config, "num_attention_heads"), _width(config, "head_dim")
    groups, rope = positive(config, "o_groups"), positive(config, "qk_rope_head_dim")
    index_width = _width(config, "index_head_dim")
    if width % 2:
        raise VerifyError(f"config 'head_dim': is odd: got {width}, want an even width")
    if heads % groups:
        raise VerifyError(
            f"config 'o_groups': does not divide the heads: got {groups}, want a divisor of {heads}"
        )
    if rope % 2 or rope > min(width, index_width):
        raise VerifyError(
            f"config 'qk_rope_head_dim': got {rope}, want an even width of at most "
            f"{min(width, index_width)}"
        )
    q_rank, o_rank = positive(config, "q_lora_rank"), positive(config, "o_lora_rank")
    return LatentSizes(
        heads, width, rope, q_rank, groups, o_rank, positive(config, "sliding_window")
    )


def _experts(config: Mapping[str, Any]) -> int:
    return positive(config, "n_routed_experts", most=1 << 14)


def _read_experts(config: Mapping[str, Any]) -> ExpertSizes:
    count, per_token = _experts(config), positive(config, "num_experts_per_tok")
    if per_token > count:
        raise VerifyError(
            f"config 'num_experts_per_tok': more than the experts: got {per_token}, "
            f"want at most {count}"
        )
    shared = positive(config, "n_shared_experts", 1)
    if shared != 1:
        raise VerifyError(f"config 'n_shared_experts': not supported: got {shared}, want 1")
    return ExpertSizes(
        count=count,
        per_token=per_token,
        width=positive(config, "moe_intermediate_size"),
        shared=shared,
        scaling=real(config, "routed_scaling_factor", 1.0),
        limit=real(config, "swiglu_limit", 10.0),
        normalise=flag(config, "norm_topk_prob", default=True),
        temperature=real(config, "gate_temperature", 1.0),
    )


def _read_rope(config: Mapping[str, Any], *, compressed: bool) -> Rope:
    """Window-only layers rotate unscaled; every compressed layer rotates with the scaled base."""
    width = positive(config, "qk_rope_head_dim")
    nested = section(config, "rope_parameters")
    if "compress" in nested and "main" in nested:
        found = section(nested, "compress" if compressed else "main")
        return Rope(real(found, "rope_theta", 0.0), width, "interleaved", _unscaled_length(found))
    if not compressed:
        return Rope(real(config, "rope_theta", 10000.0), width, "interleaved")
    scaling = section(config, "rope_scaling") or nested
    theta = real(config, "compress_rope_theta", 160000.0)
    return Rope(theta, width, "interleaved", _unscaled_length(scaling))


def _unscaled_length(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Scaled frequencies, but no factor on cos and sin."""
    return {**scaling, "attention_factor": 1.0} if scaling else {}


def _read_group(config: Mapping[str, Any], default: int) -> int:
    """Channels of one scale of quantised activations: the width of a weight block."""
    block = weight_block(config)
    return default if block is None else block[1]


def weight_block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return rows and columns that share a scale in fp8 weights; None if nothing says so."""
    quantisation = section(config, "quantization_config")
    for key, wanted in _QUANTISED:
        got = quantisation.get(key)
        if got is not None and got != wanted:
            raise VerifyError(f"config '{key}': not supported: got {shown(got)}, want '{wanted}'")
    block = quantisation.get("weight_block_size")
    if block is None:
        return None
    is_pair = isinstance(block, list) and all(type(n) is int for n in block)
    if not is_pair or tuple(block) not in FP8_BLOCKS:
        wants = " or ".join(str(list(b)) for b in FP8_BLOCKS)
        raise VerifyError(f"config 'weight_block_size': got {shown(block)}, want {wants}")
    return block[0], block[1]


def expert_dtype(config: Mapping[str, Any]) -> str | None:
    """Return what a configuration says routed experts are stored in; None if nothing says so."""
    for place in (config, section(config, "quantization_config")):
        found = place.get("expert_dtype")
        if found is None:
            continue
        if found not in _EXPERT_DTYPES:
            raise VerifyError(
                f"config 'expert_dtype': got {shown(found)}, want {' or '.join(_EXPERT_DTYPES)}"
            )
        return str(found)
    return None
