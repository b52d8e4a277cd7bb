"""The part of bash that scripts of training runs are written in, evaluated without running any."""
