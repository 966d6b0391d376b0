"""Imports run one way, from the tools down to the number formats."""

import ast
from pathlib import Path

import pytest

PACKAGE = "autoematic_jax"
# The subpackages that the checkout keeps beside the package's own folder.
MAPPED = ("models", "pallas_kernels", "serving")

CACHE = {"kv_codecs", "kv_cache", "kv_pages", "page_pool"}
NUMERICS = {"arithmetic", "bfloat16", "formats", "pallas_kernels"}
CONTROL = {"policy", "signals"}
GENERATION = {
  "generation",
  "generation_run",
  "language_model",
  "precisions",
  "programs",
  "prompts",
  "results",
  "sampling",
  "tokenizer",
}
BELOW_TOOLS = {
  *NUMERICS,
  *CONTROL,
  *CACHE,
  *GENERATION,
  "baselines",
  "calibration",
  "checkpoints",
  "compilation_cache",
  "files",
  "models",
  "reporting",
  "serving",
  PACKAGE,
}
TOOLS = {"accelerator", "cli", "evaluation"}

# What each part may import, besides itself and `errors`. The package's own
# name stands for its public functions, `load` and `generate`.
MAY_IMPORT = {
  "arithmetic": set(),
  "bfloat16": set(),
  "compilation_cache": set(),
  "errors": set(),
  "files": set(),
  "formats": {"arithmetic"},
  "pallas_kernels": {"arithmetic", "formats"},
  "signals": {"arithmetic"},
  "policy": {"signals"},
  "calibration": NUMERICS | CONTROL | CACHE | {"files", "models", "tokenizer"},
  "baselines": NUMERICS | CONTROL,
  "kv_codecs": {"arithmetic", "bfloat16", "formats"},
  "kv_cache": {"formats", "kv_codecs"},
  "kv_pages": {"kv_cache", "kv_codecs"},
  "page_pool": {"kv_pages"},
  "models": NUMERICS | CONTROL | CACHE | {"files"},
  "checkpoints": NUMERICS | {"files", "models", "policy", "tokenizer"},
  "tokenizer": set(),
  "sampling": {"arithmetic"},
  **dict.fromkeys(
    GENERATION - {"tokenizer", "sampling"},
    NUMERICS | CONTROL | CACHE | GENERATION | {"models", "checkpoints"},
  ),
  PACKAGE: GENERATION | {"policy"},
  "reporting": BELOW_TOOLS - {"serving"},
  "serving": BELOW_TOOLS - {"reporting"},
  **dict.fromkeys(TOOLS, BELOW_TOOLS | TOOLS),
}


def module_files(root: Path) -> list[Path]:
  folders = [root / name for name in (PACKAGE, *MAPPED)]
  return sorted(file for f in folders for file in f.rglob("*.py"))


def part_of_file(root: Path, file: Path) -> str:
  top, *rest = file.relative_to(root).with_suffix("").parts
  if top in MAPPED:
    return top
  return PACKAGE if rest[0] == "__init__" else rest[0]


def imported_modules(file: Path) -> set[str]:
  """Dotted names; `from a import b` gives `a.b`, as b may be a module."""
  names = set()
  for node in ast.walk(ast.parse(file.read_text(), str(file))):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"{file}: relative import, line {node.lineno}"
      names |= {f"{node.module}.{alias.name}" for alias in node.names}
  return names


def imported_parts(file: Path) -> set[str]:
  parts = set()
  for name in imported_modules(file):
    top, _, rest = name.partition(".")
    if top == PACKAGE:
      part = rest.partition(".")[0]
      parts.add(part if part in MAY_IMPORT else PACKAGE)
  return parts


def test_every_module_has_a_layer(root):
  parts = {part_of_file(root, file) for file in module_files(root)}
  assert parts <= MAY_IMPORT.keys()


def test_parts_import_only_what_lies_below_them(root):
  wrong = []
  for file in module_files(root):
    part = part_of_file(root, file)
    allowed = MAY_IMPORT[part] | {part, "errors"}
    wrong += [
      f"{file.relative_to(root)} imports {other}"
      for other in sorted(imported_parts(file) - allowed)
    ]
  assert not wrong


def test_checkpoints_know_models_only_by_their_name_maps(root):
  used = {
    name
    for file in (root / PACKAGE / "checkpoints").rglob("*.py")
    for name in imported_modules(file)
    if name.startswith(f"{PACKAGE}.models")
  }
  known = (f"{PACKAGE}.models.config", f"{PACKAGE}.models.registry")
  assert [name for name in used if not name.startswith(known)] == []


def files_importing(root: Path, name: str) -> list[str]:
  return [
    str(file.relative_to(root))
    for file in module_files(root)
    if any(f"{used}.".startswith(f"{name}.") for used in imported_modules(file))
  ]


@pytest.mark.parametrize("name", ["jax._src", *MAPPED])
def test_no_module_imports(root, name):
  """Private JAX may change; bare folder names exist in the checkout only."""
  assert files_importing(root, name) == []


@pytest.mark.parametrize(
  ("name", "modules"),
  [
    ("jaxlib", ["mlir", "scalars"]),
    ("jax.experimental.mosaic.gpu.utils", ["mlir"]),
  ],
)
def test_few_modules_import_mlir(root, name, modules):
  """Neither promises stability, but nothing public multiplies from registers.

  `plgpu.inline_mgpu` is public; what its body is written in is not.
  """
  only = [f"pallas_kernels/sm90/{module}.py" for module in modules]
  assert files_importing(root, name) == only


def test_tests_import_the_package_by_its_full_name(root):
  for file in (root / "tests").rglob("*.py"):
    tops = {name.partition(".")[0] for name in imported_modules(file)}
    assert not tops & set(MAPPED), file
