"""SVG drawings of boxes, lines and text: small files, equal for equal input, in the reader's system fonts."""

from __future__ import annotations

from html import escape

INK, MUTED, LINE = "#1f2933", "#5f6b76", "#9aa5b1"
KEPT, COMPUTED, STATE, PLAIN, LOST = "#b2dfdb", "#ffcc80", "#90caf9", "#eceff1", "#ef9a9a"
FONT = "system-ui, -apple-system, 'Segoe UI', sans-serif"
MONO = "ui-monospace, 'SF Mono', Menlo, Consolas, monospace"


class Drawing:
    """SVG picture on a white ground, which is legible on dark pages, too.

    Args:
        width: Width, in pixels.
        height: Height, in pixels.
        title: Text for readers who do not see it.
        ground: Color of the ground.
    """

    def __init__(self, width: float, height: float, title: str, ground: str = "#ffffff") -> None:
        self._size, self._title, self._ground = (width, height), title, ground
        self._parts: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, text: str = "", fill: str = PLAIN, dashed: bool = False
    ) -> None:
        """Draw a box with text in its middle."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}" '
            f'stroke="{LINE}"{dash}/>'
        )
        if text:
            self.text(x + width / 2, y + height / 2 + 4, text, anchor="middle")

    def text(self, x: float, y: float, text: str, *, anchor: str = "start", fill: str = INK, size: float = 12) -> None:
        """Draw a line of text; y is its base line."""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}" font-size="{size:g}">{escape(text)}</text>'
        )

    def mono(self, x: float, y: float, text: str, fill: str = INK, size: float = 12) -> None:
        """Draw a line of text in a font of fixed width, spaces included."""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" fill="{fill}" font-size="{size:g}" font-family="{MONO}" '
            f'xml:space="preserve">{escape(text)}</text>'
        )

    def note(self, x: float, y: float, text: str, anchor: str = "start") -> None:
        """Draw a line of small, grey text."""
        self.text(x, y, text, anchor=anchor, fill=MUTED, size=11)

    def arrow(self, x: float, y: float, to_x: float, to_y: float, dashed: bool = False) -> None:
        """Draw a line with a head at its end."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self._parts.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{MUTED}"{dash} marker-end="url(#head)"/>'
        )

    def dot(self, x: float, y: float, text: str = "S", fill: str = STATE) -> None:
        """Draw a circle with a letter: a snapshot."""
        self._parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="9" fill="{fill}" stroke="{LINE}"/>')
        self.text(x, y + 4, text, anchor="middle", size=11)

    def svg(self) -> str:
        """Return the file's text."""
        width, height = self._size
        head = (
            f'<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0L8 4L0 8z" fill="{MUTED}"/></marker>'
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" role="img" font-family="{FONT}">\n<title>{escape(self._title)}</title>\n'
            f'<defs>{head}</defs>\n<rect width="100%" height="100%" fill="{self._ground}"/>\n'
            + "\n".join(self._parts)
            + "\n</svg>\n"
        )
