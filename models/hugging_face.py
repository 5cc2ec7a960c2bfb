"""Hugging Face directories: config.json, safetensors, tokenizer.json and what lies beside them."""

from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer

from tilewright.graph.errors import VerifyError
from tilewright.models.record import (
    Checkpoint,
    Generation,
    TensorEntry,
    read_object,
    read_text,
    shown,
)
from tilewright.models.safetensors_file import INDEX_NAME, read_safetensors, read_sharded
from tilewright.models.scales import join_scales
from tilewright.models.settings import MAX_INT
from tilewright.models.tokenizer import load_tokenizer

WEIGHTS_NAME = "model.safetensors"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_SPECIAL = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip


def _read_weights(folder: Path) -> dict[str, TensorEntry]:
    """The tensors of the directory, from one file or a sharded set."""
    single, index = folder / WEIGHTS_NAME, folder / INDEX_NAME
    if single.exists() and index.exists():
        raise VerifyError(
            f"directory '{folder}': has both {WEIGHTS_NAME} and {INDEX_NAME}, want one of them"
        )
    if single.exists():
        return read_safetensors(single)
    if index.exists():
        return read_sharded(index)
    pickles = sorted(each.name for each in folder.iterdir() if each.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise VerifyError(
            f"directory '{folder}': weights are in pickle files, which can run code and are never "
            f"read: got {shown(pickles[0])}, want {WEIGHTS_NAME}; convert them to safetensors"
        )
    raise VerifyError(
        f"directory '{folder}': no weights: got neither {WEIGHTS_NAME} nor {INDEX_NAME}"
    )


def _is_same_rope(
    scaling: Mapping[str, object], flat: Mapping[str, object], config: Mapping[str, object]
) -> bool:
    """Whether two records of rotary settings agree, whichever name they have for the type; an older
    one has the base beside it."""
    plain = [
        {"rope_type": each.get("type", "default"), "rope_theta": config.get("rope_theta"),
         **{key: value for key, value in each.items() if key != "type" and value is not None}}
        for each in (scaling, flat)
    ]  # fmt: skip
    return plain[0] == plain[1]


def _rope(config: Mapping[str, object]) -> dict[str, object]:
    """Rotary settings under their classic keys: newer files keep them in `rope_parameters`."""
    found: dict[str, object] = {}
    scaling = config.get("rope_scaling")
    flat = config.get("rope_parameters")
    if isinstance(flat, dict) and not any(isinstance(each, dict) for each in flat.values()):
        if isinstance(scaling, dict) and not _is_same_rope(scaling, flat, config):
            raise VerifyError(
                "config 'rope_scaling': says something else than 'rope_parameters': "
                f"got {shown(scaling)} and {shown(flat)}, want one of them"
            )
        scaling = flat
    if isinstance(scaling, dict):
        moved = ("partial_rotary_factor", "rope_theta")
        found |= {key: scaling[key] for key in moved if scaling.get(key) is not None}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        named = (*moved, "rope_type", "type")
        rest = {key: value for key, value in scaling.items() if key not in named}
        scaling = {**rest, "rope_type": kind} if rest or kind != "default" else None
    found["rope_scaling"] = scaling
    return found


def normalise_config(stored: Mapping[str, object]) -> dict[str, object]:
    """Settings with the defaults that the Llama family's configuration classes fill in.

    Adds `rope_pairing` "half"; leaves every other key as the file has it.
    """
    config: dict[str, object] = {**stored, **_rope(stored)}
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if config.get("num_key_value_heads") is None:
        config["num_key_value_heads"] = heads
    if config.get("head_dim") is None and type(heads) is int and type(hidden) is int and heads > 0:
        config["head_dim"] = hidden // heads
    defaults = {
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": config.get("model_type") == "qwen2",
        "rope_pairing": "half",
    }
    return {**defaults, **config}


def _token_ids(value: object, key: str, where: str) -> tuple[int, ...]:
    """One token id, a list of them, or nothing."""
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(each) is int and 0 <= each < MAX_INT for each in listed):
        raise VerifyError(
            f"setting '{key}' ({where}): got {shown(value)}, want token ids from 0 on, below "
            f"{MAX_INT}"
        )
    return tuple(listed)


def _optional_object(path: Path) -> dict[str, object]:
    return read_object(path) if path.exists() else {}


def _read_generation(
    folder: Path,
    config: Mapping[str, object],
    settings: Mapping[str, object],
    tokenizer: Tokenizer | None,
) -> Generation:
    """Tokens that start and end a text; generation_config.json wins over config.json."""
    own = _optional_object(folder / "generation_config.json")
    stored = {**config, **{key: value for key, value in own.items() if value is not None}}
    eos_ids = _token_ids(stored.get("eos_token_id"), "eos_token_id", str(folder))
    first = _token_ids(stored.get("bos_token_id"), "bos_token_id", str(folder))
    bos = first[0] if first else None
    add_bos = settings.get("add_bos_token")
    if not isinstance(add_bos, bool):
        # Where no setting says so, what the tokenizer itself puts before a text decides.
        start = [] if tokenizer is None else tokenizer.encode("").ids
        add_bos = bos is not None and start[:1] == [bos]
    return Generation(eos_ids, bos, add_bos and bos is not None)


def _read_template(folder: Path, settings: Mapping[str, object]) -> str | None:
    """The chat template: its own file, or the setting of the tokenizer (named "default")."""
    own = folder / "chat_template.jinja"
    if own.exists():
        return read_text(own)
    stored = settings.get("chat_template")
    if isinstance(stored, list):
        named = [each for each in stored if type(each) is dict and each.get("name") == "default"]
        stored = named[-1].get("template") if named else None
    elif isinstance(stored, dict):
        stored = stored.get("default")
    if stored is not None and not isinstance(stored, str):
        raise VerifyError(
            f"setting 'chat_template' ({folder / 'tokenizer_config.json'}): "
            f"got {shown(stored)}, want a string"
        )
    return stored


def _read_special_tokens(folder: Path, settings: Mapping[str, object]) -> dict[str, str]:
    """Texts of the special tokens by name, each a text or an object with `content`; null says that
    there is none."""
    found = {**_optional_object(folder / "special_tokens_map.json"), **settings}
    texts: dict[str, str] = {}
    for name in _SPECIAL:
        value = found.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            texts[name] = text
        elif name in found and name in ("bos_token", "eos_token"):
            texts[name] = ""
    return texts


def _read_tokenizer(path: Path) -> tuple[str | None, Tokenizer | None]:
    """The tokenizer's text as it is, and loaded; a directory may come without one."""
    if not path.exists():
        return None, None
    text = read_text(path)
    return text, load_tokenizer(text, f"file '{path}'")


def _no_model(folder: Path) -> str:
    """Say what a folder without config.json is instead of a model, as far as that can be seen."""
    if (folder / "manifest.json").exists() and (folder / "kernels").is_dir():
        return "is an artifact, which is compiled already: want the model that it was made from"
    files = sorted(path.name for path in folder.glob("*.gguf"))
    if files:
        return f"no config.json: want a model; for the GGUF file in it, give its path: {files[0]}"
    return (
        f"is no model: got no config.json, want that and {WEIGHTS_NAME}, or the path of a GGUF file"
    )


def open_directory(folder: Path) -> Checkpoint:
    """Open a Hugging Face directory. Raises VerifyError for anything missing or malformed."""
    if not (folder / "config.json").exists():
        raise VerifyError(f"directory '{folder}': {_no_model(folder)}")
    config = normalise_config(read_object(folder / "config.json"))
    tensors = join_scales(_read_weights(folder))
    settings = _optional_object(folder / "tokenizer_config.json")
    text, tokenizer = _read_tokenizer(folder / "tokenizer.json")
    return Checkpoint(
        name=folder.resolve().name,
        source=folder,
        config=config,
        tensors=tensors,
        tokenizer_json=text,
        chat_template=_read_template(folder, settings),
        generation=_read_generation(folder, config, settings, tokenizer),
        special_tokens=_read_special_tokens(folder, settings),
    )
