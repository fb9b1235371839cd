"""Attachments of a study: annotations, clinical records, waveforms."""
