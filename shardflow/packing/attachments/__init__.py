"""Attachment kinds of this package: annotations, clinical records and waveforms."""
