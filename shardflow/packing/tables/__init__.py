"""Tables of labels and other columns, joined to the samples of a dataset (docs/tables.md).

`readers` turns files into batches of columns, `kinds` finds the kind of each column and what must stay out,
`keys` finds the rows of the dataset that a key names, and `joining` puts them together.
"""
