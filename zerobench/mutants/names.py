"""All mutants by name. No torch."""

from __future__ import annotations

from zerobench.mutants.mutant import Mutant
from zerobench.mutants.table_first import ROWS as FIRST
from zerobench.mutants.table_more import ROWS as FOURTH
from zerobench.mutants.table_rows import ROWS as THIRD
from zerobench.mutants.table_second import ROWS as SECOND

MUTANTS: dict[str, Mutant] = {mutant.name: mutant for mutant in (*FIRST, *SECOND, *THIRD, *FOURTH)}
