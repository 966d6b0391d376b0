"""What is built and installed is what the checkout holds."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

NOT_COPIED = shutil.ignore_patterns(
  ".*", "build", "dist", "*.egg-info", "__pycache__"
)

# Walks the files of the installed package, so that a module which nothing
# imports is imported too.
IMPORT_ALL = """
import importlib, json, pathlib, autoematic_jax
top = pathlib.Path(autoematic_jax.__file__).parent
names = []
for file in sorted(top.rglob("*.py")):
  parts = file.relative_to(top.parent).with_suffix("").parts
  names.append(".".join(parts).removesuffix(".__init__"))
for name in names:
  module = importlib.import_module(name)
  assert pathlib.Path(module.__file__).is_relative_to(top), module.__file__
print(json.dumps(names))
"""


def packages_in_tree(root: Path) -> list[str]:
  """Every folder with an `__init__.py`, by the name it is imported by."""
  names = []
  for top in ("autoematic_jax", "models", "pallas_kernels", "serving"):
    for file in (root / top).rglob("__init__.py"):
      parts = file.parent.relative_to(root).parts
      prefix = () if top == "autoematic_jax" else ("autoematic_jax",)
      names.append(".".join((*prefix, *parts)))
  return sorted(names)


def modules_in_tree(root: Path) -> set[str]:
  names = set()
  for top in ("autoematic_jax", "models", "pallas_kernels", "serving"):
    for file in (root / top).rglob("*.py"):
      parts = file.relative_to(root).with_suffix("").parts
      prefix = () if top == "autoematic_jax" else ("autoematic_jax",)
      names.add(".".join((*prefix, *parts)).removesuffix(".__init__"))
  return names


def build(kind: str, source: Path, destination: Path) -> Path:
  """Builds as `pip` does, from the installed setuptools: without a network."""
  code = (
    "import sys, setuptools.build_meta as backend\n"
    f"print(backend.build_{kind}(sys.argv[1]))"
  )
  done = subprocess.run(
    [sys.executable, "-c", code, str(destination)],
    cwd=source,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  return destination / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def sdist(root, tmp_path_factory) -> Path:
  folder = tmp_path_factory.mktemp("sdist")
  source = folder / "source"
  shutil.copytree(root, source, ignore=NOT_COPIED)
  return build("sdist", source, folder)


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory) -> Path:
  """A wheel made from the source distribution, as an installer would."""
  folder = tmp_path_factory.mktemp("wheel")
  with tarfile.open(sdist) as archive:
    archive.extractall(folder, filter="data")
  (source,) = folder.iterdir()
  return build("wheel", source, folder)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
  """The Python of an environment that holds the wheel, not the checkout."""
  folder = tmp_path_factory.mktemp("environment")
  venv.create(folder, with_pip=False)
  python = folder / "bin" / "python"
  arguments = ["install", "--quiet", "--no-deps", "--no-index"]
  subprocess.run(
    [sys.executable, "-m", "pip", "--python", python, *arguments, wheel],
    check=True,
    capture_output=True,
  )
  # The dependencies come from the running environment. Its own .pth files,
  # one of which maps the checkout, are not read from there.
  site = subprocess.run(
    [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
    check=True,
    capture_output=True,
    text=True,
  ).stdout.strip()
  dependencies = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
  Path(site, "dependencies.pth").write_text("\n".join(sorted(dependencies)))
  return python


def run_installed(python: Path, code: str, cwd: Path) -> str:
  done = subprocess.run(
    [python, "-c", code],
    cwd=cwd,
    env=dict(os.environ, JAX_PLATFORMS="cpu", PYTHONPATH=""),
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


def test_packages_listed_are_the_packages_there(root):
  settings = tomllib.loads((root / "pyproject.toml").read_text())
  listed = settings["tool"]["setuptools"]["packages"]
  assert listed == packages_in_tree(root)


def test_wheel_has_one_top_level_package(wheel):
  with zipfile.ZipFile(wheel) as archive:
    tops = {name.partition("/")[0] for name in archive.namelist()}
  (metadata,) = (name for name in tops if name.endswith(".dist-info"))
  assert tops - {metadata} == {"autoematic_jax"}


def test_wheel_carries_license_type_marker_and_command(wheel):
  with zipfile.ZipFile(wheel) as archive:
    names = archive.namelist()
    (entry_points,) = (n for n in names if n.endswith("entry_points.txt"))
    commands = archive.read(entry_points).decode()
  assert "autoematic = autoematic_jax.cli.main:main" in commands
  assert "autoematic_jax/py.typed" in names
  assert any(name.endswith("licenses/LICENSE") for name in names)


def test_every_module_imports_from_the_wheel(root, installed, tmp_path):
  names = json.loads(run_installed(installed, IMPORT_ALL, tmp_path))
  assert set(names) == modules_in_tree(root)


@pytest.mark.parametrize("name", ["models", "pallas_kernels", "serving"])
def test_folders_are_not_importable_by_their_bare_name(
  installed, tmp_path, name
):
  code = f"import importlib.util as u; print(u.find_spec({name!r}))"
  assert run_installed(installed, code, tmp_path).strip() == "None"


def test_installed_command_tells_its_version(installed, tmp_path):
  command = installed.with_name("autoematic")
  told = subprocess.run(
    [command, "--version"],
    cwd=tmp_path,
    env=dict(os.environ, PYTHONPATH=""),
    check=True,
    capture_output=True,
    text=True,
  ).stdout
  code = "import importlib.metadata as m; print(m.version('autoematic_jax'))"
  version = run_installed(installed, code, tmp_path).strip()
  assert told.split() == ["autoematic", version]


def test_source_distribution_holds_the_tests(root, sdist):
  with tarfile.open(sdist) as archive:
    names = {name.partition("/")[2] for name in archive.getnames()}
  tests = {
    str(file.relative_to(root))
    for file in (root / "tests").rglob("*")
    if file.is_file() and file.suffix not in (".pyc", ".pyo")
  }
  assert tests <= names
  assert {"Makefile", "README.md", "LICENSE", "pyproject.toml"} <= names
