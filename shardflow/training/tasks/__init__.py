"""Tasks of the training job: reports, classes, and what users state on their own."""
