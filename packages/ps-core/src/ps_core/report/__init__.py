"""Draw what fills the compute tier over a step: `tide` computes it from a plan, `tide_text` and `tide_svg` draw it."""

from ps_core.report.characters import GLYPHS, LETTERS, tide_text
from ps_core.report.columns import CATEGORIES, Category, Column, Tide, tide
from ps_core.report.picture import tide_svg

__all__ = ["CATEGORIES", "GLYPHS", "LETTERS", "Category", "Column", "Tide", "tide", "tide_svg", "tide_text"]
