r"""Writes the trained model as the project ships it.

    python -m autoematic_jax.models.reference.export --text FOLDER \
      --checkpoint state.npz

Beside the weights lie the held-out problems and a sample of held-out text, to
measure what a lower precision costs.
"""

import argparse
import shutil
from pathlib import Path

from autoematic_jax.models.reference import network
from autoematic_jax.models.reference import problem_file
from autoematic_jax.models.reference import tasks
from autoematic_jax.models.reference import text as text_lib
from autoematic_jax.models.reference import training_state
from autoematic_jax.models.reference import vocabulary
from autoematic_jax.models.reference import weights

SAMPLE_SIZE = 100_000
"""Characters of held-out text."""

LARGEST = 32_000_000
"""Bytes of all files together."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def export(
  checkpoint: Path,
  config: network.NetworkConfig,
  *,
  text: Path,
  tokenizer: Path,
  out: Path,
) -> None:
  """Writes weights, configs, tokenizer, problems and text into a folder.

  Args:
    checkpoint: What training saved.
    config: The network's sizes.
    text: The folder of articles that was trained on.
    tokenizer: Folder of the tokenizer.
    out: Where to write; may be `tokenizer`.
  """
  params = training_state.load_params(checkpoint, config)
  ids = vocabulary.load(tokenizer)
  weights.save(
    out,
    params,
    config,
    eos_id=vocabulary.token_id(ids, vocabulary.END),
    pad_id=vocabulary.token_id(ids, vocabulary.END_OF_TEXT),
  )
  if out.resolve() != tokenizer.resolve():
    for name in _TOKENIZER_FILES:
      shutil.copyfile(tokenizer / name, out / name)
  problem_file.save(out / problem_file.NAME, tasks.held_out())
  _, held_out = text_lib.articles(text)
  (out / "sample.txt").write_text(
    text_lib.sample(held_out, SAMPLE_SIZE), encoding="utf-8"
  )


def main() -> None:
  """Exports and tells the size.

  Raises:
    SystemExit: The files are too large to ship.
  """
  parser = argparse.ArgumentParser(description="Export the trained model.")
  add = parser.add_argument
  add("--checkpoint", type=Path, required=True, help="what training saved")
  add("--text", type=Path, required=True, help="folder of .txt files")
  add("--tokenizer", type=Path, default=vocabulary.MODEL_FOLDER)
  add("--out", type=Path, default=vocabulary.MODEL_FOLDER)
  add("--size", choices=sorted(network.SIZES), default="reference")
  args = parser.parse_args()
  export(
    args.checkpoint,
    network.SIZES[args.size],
    text=args.text,
    tokenizer=args.tokenizer,
    out=args.out,
  )
  size = sum(file.stat().st_size for file in args.out.iterdir())
  print(f"{args.out}: {size / 1e6:.2f} MB")
  if size > LARGEST:
    raise SystemExit(f"more than the {LARGEST / 1e6:.0f} MB to be shipped")


if __name__ == "__main__":
  main()
