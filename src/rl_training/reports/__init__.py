"""Reports over run directories: reading runs, the numbers, and the ways to show them."""
