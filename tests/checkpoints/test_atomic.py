"""A destination appears whole or not at all, however a run ends."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from autoematic_jax.checkpoints import convert
from autoematic_jax.checkpoints import load_checkpoint
from autoematic_jax.checkpoints import orbax_io
from autoematic_jax.errors import CheckpointError

# Runs the command, and stops for good before it writes the second item.
STOPPING = """
import signal, sys
from autoematic_jax.checkpoints import orbax_io
from autoematic_jax.cli import main
save, count = orbax_io.save_item, 0
def save_item(*args):
  global count
  count += 1
  if count == 2:
    print("stopped", flush=True)
    while True:
      signal.pause()
  save(*args)
orbax_io.save_item = save_item
sys.argv = ["autoematic", "convert", *sys.argv[1:], "--quiet"]
main.main()
"""


def start_and_stop(source: Path, out: Path) -> subprocess.Popen:
  """A conversion that has written one item and waits."""
  process = subprocess.Popen(
    [sys.executable, "-c", STOPPING, source, out],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    env={**os.environ, "JAX_PLATFORMS": "cpu"},
  )
  assert process.stdout.readline() == "stopped\n", process.communicate()[1]
  return process


def beside(out: Path) -> list[str]:
  return sorted(path.name for path in out.parent.glob(f"{out.name}*"))


def test_an_existing_destination_is_kept(checkpoint_path, hf_folder):
  metadata = checkpoint_path / "autoematic.json"
  before = metadata.stat().st_mtime_ns
  with pytest.raises(CheckpointError, match="already exists; --force"):
    convert(hf_folder(name="again"), checkpoint_path)
  assert metadata.stat().st_mtime_ns == before


def test_force_replaces_it(checkpoint_path, hf_folder):
  convert(hf_folder(name="again"), checkpoint_path, format="bf16", force=True)
  assert load_checkpoint(checkpoint_path).format == "bf16"
  assert beside(checkpoint_path) == [checkpoint_path.name]


def test_a_forced_run_that_fails_leaves_the_old_one(
  checkpoint_path, hf_folder, monkeypatch
):
  def fail(*args):
    raise KeyboardInterrupt

  monkeypatch.setattr(orbax_io, "save_item", fail)
  with pytest.raises(KeyboardInterrupt):
    convert(hf_folder(name="again"), checkpoint_path, force=True)
  monkeypatch.undo()
  assert len(dict(load_checkpoint(checkpoint_path).tensors())) == 20
  assert beside(checkpoint_path) == [checkpoint_path.name]


def test_force_never_deletes_what_is_no_checkpoint(hf_folder, tmp_path):
  folder = hf_folder()
  with pytest.raises(CheckpointError, match=r"not a converted.*config\.json"):
    convert(folder, folder, force=True)
  file = tmp_path / "notes.txt"
  file.write_text("mine")
  with pytest.raises(CheckpointError, match="not a directory"):
    convert(folder, file, force=True)
  assert file.read_text() == "mine"
  assert (folder / "model.safetensors").exists()


def test_a_link_is_followed(checkpoint_path, hf_folder, tmp_path):
  link = tmp_path / "link"
  link.symlink_to(checkpoint_path)
  convert(hf_folder(name="again"), link, format="bf16", force=True)
  assert link.is_symlink()
  assert load_checkpoint(checkpoint_path).format == "bf16"


def test_a_full_disk_is_one_clear_line(hf_folder, tmp_path, monkeypatch):
  usage = namedtuple("usage", "free")
  monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(free=300_000))
  with pytest.raises(CheckpointError, match=r"disk is full.*0\.3 MB are free"):
    convert(hf_folder(), tmp_path / "out")
  assert beside(tmp_path / "out") == []


@pytest.mark.parametrize(
  "error",
  [
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EDQUOT, "Disk quota exceeded"),
    ValueError("RESOURCE_EXHAUSTED: Error writing: No space left on device"),
  ],
)
def test_a_disk_that_fills_while_writing_is_one_too(
  hf_folder, tmp_path, monkeypatch, error
):
  def fail(*args):
    raise error

  monkeypatch.setattr(orbax_io, "save_item", fail)
  with pytest.raises(CheckpointError, match="disk is full while writing"):
    convert(hf_folder(), tmp_path / "out")
  assert beside(tmp_path / "out") == []


def test_a_destination_that_cannot_be_made_is_named(hf_folder, tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(CheckpointError, match="cannot write"):
    convert(hf_folder(), tmp_path / "file" / "out")


def test_a_killed_run_looks_unfinished_and_the_next_one_clears_it(
  hf_folder, tmp_path
):
  folder, out = hf_folder(), tmp_path / "out"
  process = start_and_stop(folder, out)
  process.kill()
  process.communicate()
  partial = tmp_path / f"out.partial-{process.pid}"
  assert beside(out) == [partial.name]
  with pytest.raises(CheckpointError, match="unfinished"):
    load_checkpoint(partial)
  convert(folder, out)
  assert beside(out) == ["out"]
  assert len(dict(load_checkpoint(out).tensors())) == 20


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_run_clears_up_after_itself(hf_folder, tmp_path, number):
  out = tmp_path / "out"
  process = start_and_stop(hf_folder(), out)
  process.send_signal(number)
  _, errors = process.communicate()
  assert process.returncode == 128 + signal.SIGINT
  assert errors.strip().splitlines()[-1] == "autoematic: interrupted"
  assert beside(out) == []


def test_a_running_conversion_is_left_alone(hf_folder, tmp_path):
  folder, out = hf_folder(), tmp_path / "out"
  process = start_and_stop(folder, out)
  try:
    convert(folder, out)
    assert beside(out) == ["out", f"out.partial-{process.pid}"]
  finally:
    process.kill()
    process.communicate()


def test_leftovers_of_a_run_with_our_own_id_are_cleared(hf_folder, tmp_path):
  (tmp_path / f"out.partial-{os.getpid()}" / "weights").mkdir(parents=True)
  convert(hf_folder(), tmp_path / "out")
  assert beside(tmp_path / "out") == ["out"]


def test_what_a_killed_run_was_replacing_is_put_back(
  checkpoint_path, hf_folder, monkeypatch
):
  moved = checkpoint_path.with_name(f"{checkpoint_path.name}.replaced-0")
  checkpoint_path.rename(moved.with_name(moved.name[:-1] + str(2**22 + 1)))

  def fail(*args):
    raise KeyboardInterrupt

  monkeypatch.setattr(orbax_io, "save_item", fail)
  with pytest.raises(KeyboardInterrupt):
    convert(hf_folder(name="again"), checkpoint_path)
  assert beside(checkpoint_path) == [checkpoint_path.name]
  assert load_checkpoint(checkpoint_path).format == "autofp6"
