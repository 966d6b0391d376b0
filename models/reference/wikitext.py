"""Plain text of Wikipedia's markup, well enough to learn English from."""

import re

# Innermost first: neither holds another of its kind.
_TEMPLATE = re.compile(r"\{\{([^{}]*)\}\}")
_LINK = re.compile(r"\[\[([^\[\]]*)\]\]")
_TABLE = re.compile(r"\{\|(?:(?!\{\|).)*?\|\}", re.DOTALL)

_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
# Elements whose content is no prose.
_ELEMENT = re.compile(
  r"<(ref|math|gallery|timeline|imagemap|source|syntaxhighlight|score|code|pre)"
  r"\b[^<>]*?(?:/>|>.*?</\1\s*>)",
  re.DOTALL | re.IGNORECASE,
)
_TAG = re.compile(r"</?[a-zA-Z][^<>]*>")
_EXTERNAL = re.compile(r"\[(?:https?:)?//[^\s\]]*\s?([^\]]*)\]")
_URL = re.compile(r"https?://\S+")
_SECTION = re.compile(r"^==([^=].*?)==\s*$", re.MULTILINE)
_HEADING = re.compile(r"^=+\s*(.*?)\s*=+\s*$", re.MULTILINE)
_LIST_MARK = re.compile(r"^[*#:;]+[ \t]*", re.MULTILINE)
_EMPTY_BRACKETS = re.compile(r"\s*\(\s*[;,:]?\s*\)")
_LEADING_MARK = re.compile(r"\(\s*[;,:]\s*")
_SPACES = re.compile(r"[ \t\u00a0]+")
_BLANK_LINES = re.compile(r"\n\s*\n+")

_DROPPED_SECTIONS = frozenset(
  {
    "awards and nominations",
    "bibliography",
    "citations",
    "external links",
    "filmography",
    "footnotes",
    "further reading",
    "gallery",
    "notes",
    "notes and references",
    "references",
    "see also",
    "sources",
    "works cited",
  }
)

_DROPPED_LINKS = ("file:", "image:", "category:", "media:")


def plain_text(markup: str) -> str:
  """Prose of one page, paragraphs parted by empty lines.

  Args:
    markup: The page as Wikipedia stores it, XML entities already decoded.
  """
  text = _COMMENT.sub("", markup)
  text = _ELEMENT.sub("", text)
  text = _until_stable(_TEMPLATE, _template_text, text)
  text = _until_stable(_TABLE, lambda _: "", text)
  text = _until_stable(_LINK, _link_text, text)
  text = _EXTERNAL.sub(r"\1", text)
  text = _TAG.sub("", _URL.sub("", text))
  text = re.sub(r"'{2,}", "", re.sub(r"__[A-Z]+__", "", text))
  text = text.replace("&nbsp;", " ").replace("&ndash;", "\u2013")
  text = _HEADING.sub(r"\1", _without_sections(text))
  text = _LIST_MARK.sub("", text)
  text = _LEADING_MARK.sub("(", _EMPTY_BRACKETS.sub("", text))
  lines = (_SPACES.sub(" ", line).strip() for line in text.splitlines())
  # What is left of broken tables and templates is no prose.
  kept = (x for x in lines if not x.startswith(("|", "!", "{", "}")))
  return _BLANK_LINES.sub("\n\n", "\n".join(kept)).strip()


def _until_stable(pattern, replacement, text: str) -> str:
  """Replaces from the inside out."""
  count = 1
  while count:
    text, count = pattern.subn(replacement, text)
  return text


def _template_text(match: re.Match) -> str:
  """Most templates are furniture; a few carry words of the sentence."""
  name, *arguments = (part.strip() for part in match[1].split("|"))
  values = [a for a in arguments if "=" not in a]
  name = name.lower()
  if name in ("convert", "cvt") and len(values) > 1:
    return f"{values[0]} {values[1]}"
  if name == "lang" and len(values) > 1:
    return values[1]
  if name in ("nowrap", "em", "small", "smallcaps") and values:
    return values[0]
  return ""


def _link_text(match: re.Match) -> str:
  """What a reader sees of a link; pictures and categories vanish."""
  target, _, shown = match[1].partition("|")
  if target.strip().lower().startswith(_DROPPED_LINKS):
    return ""
  return shown.rpartition("|")[2] if shown else target.lstrip(":")


def _without_sections(text: str) -> str:
  """Leaves out sections that are lists of references."""
  head, *rest = _SECTION.split(text)
  kept = [head]
  for title, body in zip(rest[::2], rest[1::2], strict=True):
    if title.strip().lower() not in _DROPPED_SECTIONS:
      kept += [f"\n{title.strip()}\n", body]
  return "".join(kept)
