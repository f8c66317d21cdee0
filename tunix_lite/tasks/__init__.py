"""Tasks: data, how it is asked, how it is graded."""
