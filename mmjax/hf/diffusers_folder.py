"""Open a part of a diffusers folder, such as its `vae`, by the part's own folder or by the whole's."""

from __future__ import annotations

from pathlib import Path

from mmjax.errors import UserError
from mmjax.hf.folder import HfFolder

WEIGHTS = "diffusion_pytorch_model.safetensors"
PIPELINE = "model_index.json"  # of a whole folder


def open_part(path: str | Path, part: str, *names: str) -> HfFolder:
    """Open `path` where it is the folder of one model, else its subfolder `part`.

    names: of the class in diffusers. Raises UserError where there is no such folder, or one of another class.
    """
    path = Path(path).expanduser()
    if (path / PIPELINE).is_file():
        path /= part
    elif not (path / "config.json").is_file():
        if not (path / part / "config.json").is_file():
            raise UserError(f"{path} is no diffusers folder: neither config.json nor {part}/config.json is there")
        path /= part
    folder = HfFolder.open(path, WEIGHTS)
    folder.fields.refuse("_class_name", *names)
    return folder
