"""Files that are whole or not there."""

import pytest

from autoematic_jax.files import replacing


def test_the_old_file_stays_until_the_new_one_is_whole(tmp_path):
  path = tmp_path / "report.json"
  path.write_text("old")
  with replacing(path) as partial:
    partial.write_text("new")
    assert path.read_text() == "old"
    assert partial.suffix == path.suffix
  assert path.read_text() == "new"
  assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_interruption_leaves_the_old_file_and_nothing_else(tmp_path, error):
  path = tmp_path / "report.json"
  path.write_text("old")

  def write_half():
    with replacing(path) as partial:
      partial.write_text("ne")
      raise error

  with pytest.raises(error):
    write_half()
  assert path.read_text() == "old"
  assert list(tmp_path.iterdir()) == [path]
