import bz2
import zipfile

import pytest

from autoematic_jax.models.reference import prepare_text
from autoematic_jax.models.reference import text
from autoematic_jax.models.reference import wikitext

MARKUP = """
{{Infobox|a={{nested|b}}|c=[[d]]}}
'''Albedo''' ({{IPA|x}}) is a [[Reflectance|reflection]] of [[light]].<ref
name="a">A book</ref> It is {{convert|12|km}} away.<!-- hidden -->

[[File:x.png|thumb|A [[picture]] of it]]
{| class="wikitable"
| cell
|}
== History ==
* First [http://example.org a page].
* Second<br/> line {{lang|la|albus}}.

== References ==
{{reflist}}
* Somebody
"""

PAGE = """<page><title>{}</title><ns>{}</ns>{}
<revision><text>{}</text></revision></page>"""


def test_markup_becomes_prose():
  assert wikitext.plain_text(MARKUP) == (
    "Albedo is a reflection of light. It is 12 km away.\n\n"
    "History\n\nFirst a page.\nSecond line albus."
  )


def test_only_articles_are_taken(tmp_path):
  pages = [
    PAGE.format("Kept", 0, "", "Some [[text]]"),
    PAGE.format("Moved", 0, "<redirect title='Kept'/>", "#REDIRECT"),
    PAGE.format("Talk:Kept", 1, "", "Talk"),
  ]
  wheel = tmp_path / "some.whl"
  with zipfile.ZipFile(wheel, "w") as archive:
    xml = f"<mediawiki>{''.join(pages)}</mediawiki>".encode()
    archive.writestr(f"a/{prepare_text._DUMP}-x.bz2", bz2.compress(xml))
  assert list(prepare_text.wikipedia_articles(wheel)) == ["Kept\n\nSome text"]


def test_a_wheel_without_text_is_an_error(tmp_path):
  wheel = tmp_path / "some.whl"
  zipfile.ZipFile(wheel, "w").close()
  with pytest.raises(FileNotFoundError, match="holds no"):
    list(prepare_text.wikipedia_articles(wheel))


def test_the_last_articles_are_held_out(tmp_path):
  for number in range(40):
    (tmp_path / f"{number:02}.txt").write_text(f"{number}\n")
  training, held_out = text.articles(tmp_path)
  assert held_out == ["38", "39"]
  assert training == [str(n) for n in range(38)]


def test_a_folder_without_text_is_an_error(tmp_path):
  with pytest.raises(FileNotFoundError, match="holds 0"):
    text.articles(tmp_path)


def test_a_sample_ends_with_a_paragraph():
  assert text.sample(["one two", "three", "four"], 16) == "one two\n\nthree\n"
  assert text.sample(["one"], 16) == "one\n"
