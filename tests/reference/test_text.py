import bz2
import shutil
import subprocess
import zipfile

import pytest

from autoematic_jax.models.reference import debian_text
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


def test_articles_are_read_back_by_name(tmp_path):
  made = [f"article {number}" for number in range(20)]
  text.write(tmp_path / text.TRAINING, "some", made)
  text.write(tmp_path / text.HELD_OUT, "some", ["another"])
  assert text.articles(tmp_path) == (made, ["another"])


def test_a_folder_without_text_is_an_error(tmp_path):
  with pytest.raises(FileNotFoundError, match=r"training holds no \.txt"):
    text.articles(tmp_path)


def test_an_article_at_least_is_held_out():
  assert [text.held_out(n) for n in (0, 1, 10, 11)] == [0, 1, 1, 2]


PAGE_OF_A_MANUAL = """<html><head><title>Left out although it is long enough
to be taken for a sentence</title></head><body><p>Short.</p>
<p>The <b>first</b> paragraph is long
enough, and &lt;marks&gt; are resolved.</p>
<pre>an example that is not prose, however long it may be made</pre>
<ul><li>One point that is also long enough to be a sentence.</li></ul></body>
"""


def test_a_page_becomes_its_paragraphs():
  assert debian_text.page_text(PAGE_OF_A_MANUAL) == (
    "The first paragraph is long enough, and <marks> are resolved.\n\n"
    "One point that is also long enough to be a sentence."
  )


DICTIONARY = """Lark \\Lark\\, v. i. [imp. & p. p. {Larked}.]
   To sport; to frolic.
   [Western U.S.]
   [1913 Webster]

   Syn: frolic.
        [WordNet 1.5]

Lari \\Lari\\ prop. n.
   A suborder of birds.
"""


def test_a_dictionary_becomes_entries():
  assert debian_text.dictionary_entries(DICTIONARY) == [
    "Lark , v. i. [imp. & p. p. Larked.] To sport; to frolic. [Western U.S.]"
    " Syn: frolic.",
    "Lari prop. n. A suborder of birds.",
  ]


def test_a_missing_package_is_named(tmp_path):
  with pytest.raises(FileNotFoundError, match="apt-get download debian-faq"):
    list(debian_text.manual_pages(tmp_path, "debian-faq"))


@pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="needs dpkg-deb")
def test_only_english_pages_of_a_package_are_read(tmp_path):
  root = tmp_path / "root"
  for name in ("a.en.html", "a.de.html"):
    page = root / "usr/share/doc/debian-faq" / name
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(f"<p>{name} has a paragraph that is long enough.</p>")
  (root / "DEBIAN").mkdir()
  (root / "DEBIAN/control").write_text(
    "Package: debian-faq\nVersion: 1\nArchitecture: all\n"
    "Maintainer: A <a@example.org>\nDescription: none\n"
  )
  package = tmp_path / "debian-faq_1_all.deb"
  subprocess.run(
    ["dpkg-deb", "--build", root, package], check=True, capture_output=True
  )
  assert list(debian_text.manual_pages(tmp_path, "debian-faq")) == [
    "a.en.html has a paragraph that is long enough."
  ]


def test_a_sample_ends_with_a_paragraph():
  assert text.sample(["one two", "three", "four"], 16) == "one two\n\nthree\n"
  assert text.sample(["one"], 16) == "one\n"
