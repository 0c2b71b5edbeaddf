"""Reports: from the records of runs to one HTML page, Markdown or the terminal.

`halfstep.diagnostics` reads the records; pure functions make a document of them (content), and a renderer writes that down (html, markdown,
terminal).
"""

from halfstep.reports.html import require
from halfstep.reports.write import FORMATS, report

__all__ = ["FORMATS", "report", "require"]
