"""Entity views: from what packing found in reports and aligned with slices to a table that is trained on.

``rows`` reads one study, ``columns`` puts rows together, ``job`` goes through a dataset. How such a table is
opened is the business of `shardflow.shards.entity_dataset`.
"""

from shardflow.entities.job import BuiltView, build_view
from shardflow.shards.entity_manifest import EntityRules

__all__ = ["BuiltView", "EntityRules", "build_view"]
