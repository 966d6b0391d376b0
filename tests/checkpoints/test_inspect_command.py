import pytest

from autoematic_jax.checkpoints import convert
from autoematic_jax.cli.main import parse_arguments
from autoematic_jax.errors import CheckpointError


def inspected(capsys, path):
  args = parse_arguments(["autoematic", "inspect", str(path)])
  assert args.run(args) == 0
  lines = capsys.readouterr().out.splitlines()
  return {line[:14].rstrip(): line[15:] for line in lines}


def test_a_checkpoint_says_how_it_was_made(hf_folder, tmp_path, capsys):
  convert(hf_folder(), tmp_path / "out", rho=0.25)
  lines = inspected(capsys, tmp_path / "out")
  assert lines["family"] == "llama"
  assert lines["levels"] == "2, 4, 6"
  assert lines["source"] == "Hugging Face folder tiny"
  assert "round to nearest" in lines["made by"]
  # 60 is no multiple of 16: the padding is never refined.
  for name in ("refined", "  layer 0", "  layer 1"):
    assert 0.2 < float(lines[name].split("%")[0]) / 100 <= 0.25


def test_an_unquantized_checkpoint_has_no_refinement(
  hf_folder, tmp_path, capsys
):
  convert(hf_folder(), tmp_path / "out", format="fp32")
  lines = inspected(capsys, tmp_path / "out")
  assert (lines["format"], lines["levels"]) == ("fp32", "none")
  assert "refined" not in lines


@pytest.mark.parametrize("kind", ["hf_folder", "gguf_file"])
def test_a_source_counts_its_parameters(kind, request, capsys):
  lines = inspected(capsys, request.getfixturevalue(kind)())
  layer = 60 * (60 + 2 * 20 + 60 + 3 * 464) + 2 * 60
  assert lines["parameters"] == f"{320 * 60 + 60 + 2 * layer:,}"
  assert lines["matrices"] == "14, of which 0 are NVFP4"


def test_a_source_that_cannot_be_converted_is_refused(hf_folder):
  args = parse_arguments(
    ["autoematic", "inspect", str(hf_folder(tie_word_embeddings=False))]
  )
  with pytest.raises(CheckpointError, match=r"lacks 1 tensor: lm_head"):
    args.run(args)
