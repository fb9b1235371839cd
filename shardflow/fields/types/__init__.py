"""Field types: what one named entry of a batch can be; each module has specs and what fills their slots."""
