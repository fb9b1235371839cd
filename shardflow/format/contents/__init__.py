"""Contents of fields that are neither arrays nor plain text: pictures, regions, records, recordings.

``ucum`` converts the units of measure that records and recordings state.
"""
