"""Random faults in whole runs, judged by files and processes alone."""
