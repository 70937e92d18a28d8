"""A job as a page in a browser: live over server-sent events, and standing still as a file. The
server needs the extra `web`.
"""

from .report import write_report
from .server import serve_page

__all__ = ["serve_page", "write_report"]
