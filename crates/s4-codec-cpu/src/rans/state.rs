//! State that the codec keeps from stream to stream, and the choice of a stream's tables.

use s4_format::{Error, Result};

use super::model::{Counts, cost};
use super::stream::{Carry, TablePlace, Tables, check_contexts};
use super::table::{MAX_TABLES, Precision, Table, parse_tables};
use crate::Symbols;

/// Sets of shared tables that are remembered: one for each plane of a layout.
const CACHED: usize = 8;

/// Memory of one thread.
#[derive(Default)]
pub(super) struct State {
    /// The bytes that each segment of the stream being decoded carries.
    pub(super) carries: Vec<Carry>,
    cache: TableCache,
    /// For each context, the counts of the stream being encoded, and the stream's own table.
    counts: Vec<Counts>,
    own: Vec<Table>,
}

/// Shared tables that were read before, with the bytes that they were read from: the chunks of a
/// tensor use the same ones again and again.
#[derive(Default)]
struct TableCache {
    sets: Vec<(Vec<u8>, Vec<Table>)>,
    /// The set that the next one replaces.
    oldest: usize,
}

impl TableCache {
    /// The tables in `bytes`.
    fn get(&mut self, precision: Precision, bytes: &[u8]) -> Result<&[Table]> {
        let same = |(read, tables): &(Vec<u8>, Vec<Table>)| {
            read == bytes && tables.first().is_some_and(|table| table.precision() == precision)
        };
        if let Some(at) = self.sets.iter().position(same) {
            return Ok(&self.sets[at].1);
        }
        let set = (bytes.to_vec(), parse_tables(precision, bytes)?);
        let at = self.oldest;
        self.oldest = (at + 1) % CACHED;
        match self.sets.get_mut(at) {
            Some(place) => *place = set,
            None => self.sets.push(set),
        }
        Ok(&self.sets[at].1)
    }
}

impl State {
    /// The tables that a stream of `symbols` is coded with.
    ///
    /// # Errors
    /// Those of [`parse_tables`]; `Limit` if there are contexts but not one for each symbol, or if
    /// one is too large.
    pub(super) fn tables(
        &mut self,
        precision: Precision,
        symbols: &Symbols<'_>,
    ) -> Result<Tables<'_>> {
        let shared = match symbols.context.tables {
            [] => None,
            bytes => Some(self.cache.get(precision, bytes)?),
        };
        if let Some(list) = shared.filter(|_| !symbols.own_tables) {
            return Ok(Tables { list, place: TablePlace::Shared });
        }
        count(symbols, &mut self.counts)?;
        self.own.clear();
        self.own.extend(self.counts.iter().map(|counts| counts.table(precision)));
        let (own, counts) = (&self.own[..], &self.counts[..]);
        let cheaper = |shared: &&[Table]| is_cheaper(shared, own, counts, symbols.bytes.len());
        Ok(match shared.filter(cheaper) {
            Some(list) => Tables { list, place: TablePlace::Shared },
            None => Tables { list: own, place: TablePlace::Inline },
        })
    }
}

/// Counts symbols: one set of counts for each context up to the largest that occurs.
fn count(symbols: &Symbols<'_>, counts: &mut Vec<Counts>) -> Result<()> {
    let (bytes, contexts) = (symbols.bytes, symbols.context.contexts);
    counts.clear();
    if !contexts.is_empty() {
        let tables = 1 + usize::from(contexts.iter().fold(0, |a, &b| a.max(b)));
        check_contexts(contexts, bytes.len(), tables.min(MAX_TABLES)).map_err(Error::limit)?;
        *counts = Counts::of_contexts(bytes, contexts, tables);
        counts.iter_mut().for_each(Counts::expect_any);
    } else if symbols.sparse {
        // Many symbols are rare, and all of them take few bits: a sample would be too coarse.
        counts.push(Counts::of_all(bytes));
    } else {
        counts.push(Counts::of_stream(bytes));
    }
    Ok(())
}

/// Whether a stream is smaller with shared tables than with its own, by estimate.
fn is_cheaper(shared: &[Table], own: &[Table], counts: &[Counts], symbols: usize) -> bool {
    if shared.len() < counts.len() {
        return false;
    }
    let total = counts.iter().map(Counts::total).sum::<u64>().max(1);
    // Counts may be a sample: costs are scaled up to all symbols.
    let bits = |tables: &[Table]| {
        let each = counts.iter().zip(tables).map(|(counts, table)| cost(counts, table));
        each.fold(0, u64::saturating_add).saturating_mul(symbols as u64) / total
    };
    let stored = own.iter().map(|table| 8 * table.encoded_len() as u64).sum::<u64>();
    bits(shared) < bits(own) + stored
}
