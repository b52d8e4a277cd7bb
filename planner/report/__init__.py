"""Reports: plans and predictions as text, HTML and traces."""
