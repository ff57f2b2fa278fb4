"""What was measured, to look at and to take away: figures, tables and reports."""
