"""Everything that must be killable: processes that make calls, and limits on their time and
memory."""
