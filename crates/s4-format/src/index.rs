//! The tensor table: the first level of the index.
//!
//! Fixed-size records, a pool of dimensions, a pool of names. Each record names the tensor's block
//! (side data and chunk table, the second level), which is read only for tensors that are wanted.

use std::ops::Range;

use crate::ChunkRecord;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::limits::{
    CHUNK_LOG2, MAX_NAME, MAX_RANK, MAX_SIDE, MAX_TENSOR_BYTES, MAX_TENSOR_TABLE, MAX_TENSORS,
};
use crate::wire::{Cursor, are_disjoint, fit};

/// Bytes of a tensor's record.
pub const RECORD_LEN: usize = 32;
/// Bytes before the first record.
pub const TABLE_HEADER_LEN: usize = 16;

/// The place of a tensor's side data and chunk table: adjacent, in that order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// Offset of the first byte in the object that holds the index.
    pub offset: u64,
    /// Bytes of both.
    pub len: u32,
    /// CRC-32C of both.
    pub crc: u32,
}

/// The place of a tensor's values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TensorKind {
    /// In chunks of its own.
    Chunks {
        /// Side data and chunk table.
        block: Block,
        /// Values in each chunk but the last: `2^chunk_log2`.
        chunk_log2: u8,
        /// Whether it is a pack: it has no name and holds the values of small tensors of its dtype.
        pack: bool,
    },
    /// In a pack: a run of its values.
    Packed {
        /// Index of the pack in the tensor table.
        pack: u32,
        /// Index of the first value in the pack.
        first: u64,
    },
}

/// A tensor as the index describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    /// Unique in the file; empty only for packs.
    pub name: String,
    /// Type of the elements.
    pub dtype: DType,
    /// Size of each dimension, in elements.
    pub shape: Vec<u64>,
    /// Index of the plan in the manifest; 0 and unused for a packed tensor.
    pub plan: u16,
    /// The place of the values.
    pub kind: TensorKind,
}

impl Tensor {
    /// Number of elements: the product of the dimensions.
    ///
    /// # Errors
    /// `Limit` if the tensor is larger than [`MAX_TENSOR_BYTES`].
    pub fn elements(&self) -> Result<u64> {
        let size = self.dtype.size() as u64;
        // A zero anywhere makes the tensor empty, however large the other dimensions are.
        let product = if self.shape.contains(&0) {
            Some(0)
        } else {
            self.shape.iter().try_fold(1u64, |p, &d| p.checked_mul(d))
        };
        product.filter(|p| p.checked_mul(size).is_some_and(|b| b <= MAX_TENSOR_BYTES)).ok_or_else(
            || {
                Error::limit(format!(
                    "shape {:?} of {} exceeds {MAX_TENSOR_BYTES} bytes",
                    self.shape, self.dtype
                ))
            },
        )
    }

    /// Bytes of the values.
    ///
    /// # Errors
    /// As [`Tensor::elements`].
    pub fn bytes(&self) -> Result<u64> {
        Ok(self.elements()? * self.dtype.size() as u64)
    }

    /// Number of values: elements, or twice as many for complex ones.
    ///
    /// # Errors
    /// As [`Tensor::elements`].
    pub fn values(&self) -> Result<u64> {
        Ok(self.bytes()? / self.dtype.value_width() as u64)
    }
}

/// Writes a tensor table.
///
/// # Errors
/// `Limit` if there are too many tensors, a name, shape or number does not fit, or the table is larger than readers accept.
pub fn write_table(tensors: &[Tensor]) -> Result<Vec<u8>> {
    if tensors.len() > MAX_TENSORS {
        return Err(Error::limit(format!(
            "{} tensors, at most {MAX_TENSORS} allowed",
            tensors.len()
        )));
    }
    let (mut records, mut dims, mut names) = (vec![], Vec::<u64>::new(), Vec::<u8>::new());
    for t in tensors {
        if t.name.len() > MAX_NAME || t.name.contains('\0') {
            return Err(Error::limit("name is longer than 4096 bytes or contains NUL")
                .in_tensor(&t.name.chars().take(80).collect::<String>()));
        }
        if t.shape.len() > MAX_RANK {
            return Err(Error::limit(format!(
                "rank {}, at most {MAX_RANK} allowed",
                t.shape.len()
            ))
            .in_tensor(&t.name));
        }
        t.elements().map_err(|e| e.in_tensor(&t.name))?;
        records.extend(fit::<u32>(names.len(), "names")?.to_le_bytes());
        records.extend(fit::<u16>(t.name.len(), "name")?.to_le_bytes());
        records.extend([t.dtype as u8, fit::<u8>(t.shape.len(), "rank")?]);
        records.extend(fit::<u32>(dims.len(), "dimensions")?.to_le_bytes());
        records.extend(t.plan.to_le_bytes());
        let (log2, kind, place, aux, crc) = match t.kind {
            TensorKind::Chunks { block, chunk_log2, pack } => {
                (chunk_log2, if pack { 2 } else { 0 }, block.offset, block.len, block.crc)
            }
            TensorKind::Packed { pack, first } => (0, 1, first, pack, 0),
        };
        records.extend([log2, kind]);
        records.extend(place.to_le_bytes());
        records.extend(aux.to_le_bytes());
        records.extend(crc.to_le_bytes());
        dims.extend(&t.shape);
        names.extend(t.name.as_bytes());
    }
    let len = TABLE_HEADER_LEN + records.len() + 8 * dims.len() + names.len();
    if len as u64 > MAX_TENSOR_TABLE {
        let what = format!(
            "tensor table has {len} bytes for {} tensors, at most {MAX_TENSOR_TABLE} bytes allowed",
            tensors.len()
        );
        return Err(Error::limit(what));
    }
    let mut out = Vec::with_capacity(len);
    out.extend(fit::<u32>(tensors.len(), "tensors")?.to_le_bytes());
    out.extend(fit::<u32>(dims.len(), "dimensions")?.to_le_bytes());
    out.extend((names.len() as u64).to_le_bytes());
    out.extend(records);
    dims.iter().for_each(|d| out.extend(d.to_le_bytes()));
    out.extend(names);
    Ok(out)
}

/// Reads a tensor table. No block may reach beyond `end`. `plans` is the number of plans in the
/// manifest. Names, shapes and blocks of different tensors must not overlap, so that the result is
/// never much larger than what it is read from.
///
/// # Errors
/// `Truncated`, `Corrupt`, `Limit` or `Unsupported`, naming the record.
pub fn parse_table(bytes: &[u8], end: u64, plans: usize) -> Result<Vec<Tensor>> {
    parse_inner(bytes, end, plans).map_err(|e| e.in_part("tensor table"))
}

fn parse_inner(bytes: &[u8], end: u64, plans: usize) -> Result<Vec<Tensor>> {
    let mut c = Cursor::new(bytes);
    let (count, dims_len, names_len) = (c.u32()? as usize, c.u32()? as usize, c.u64()?);
    if count > MAX_TENSORS {
        return Err(Error::limit(format!("{count} tensors, at most {MAX_TENSORS} allowed")));
    }
    let names_len =
        usize::try_from(names_len).map_err(|_| Error::limit("too many bytes of names"))?;
    let records = c.take(count * RECORD_LEN)?;
    let dims =
        c.take(dims_len.checked_mul(8).ok_or_else(|| Error::limit("too many dimensions"))?)?;
    let names = c.take(names_len)?;
    if c.rest() != 0 {
        return Err(Error::corrupt(format!("{} unexpected bytes after the names", c.rest())));
    }
    let pools = Pools { dims, names };
    check_pools(records)?;
    let mut tensors: Vec<Tensor> = Vec::with_capacity(count);
    for (i, record) in records.chunks_exact(RECORD_LEN).enumerate() {
        let at = |e: Error| e.at_offset((TABLE_HEADER_LEN + i * RECORD_LEN) as u64);
        let t = parse_record(record, &pools).map_err(at)?;
        check_record(&t, end, plans).map_err(|e| e.in_tensor(&t.name)).map_err(at)?;
        tensors.push(t);
    }
    for t in &tensors {
        check_relations(t, &tensors).map_err(|e| e.in_tensor(&t.name))?;
    }
    let named = by_name(&tensors);
    let name = |i: u32| &tensors[i as usize].name;
    if let Some(twice) = named.windows(2).find(|w| name(w[0]) == name(w[1])) {
        return Err(Error::corrupt("duplicate tensor name").in_tensor(name(twice[0])));
    }
    Ok(tensors)
}

/// The indices of all tensors that have a name, sorted by name.
pub fn by_name(tensors: &[Tensor]) -> Vec<u32> {
    // A tensor table has at most 2^22 records.
    let numbered = (0u32..).zip(tensors);
    let mut named: Vec<u32> =
        numbered.filter(|(_, t)| !t.name.is_empty()).map(|(i, _)| i).collect();
    named.sort_unstable_by(|&a, &b| tensors[a as usize].name.cmp(&tensors[b as usize].name));
    named
}

/// Checks that names, shapes and blocks of different records do not overlap.
fn check_pools(records: &[u8]) -> Result<()> {
    for (i, what) in ["names", "shapes", "blocks"].into_iter().enumerate() {
        // No record is left out: `places` fails only for short ones.
        let places = records.chunks_exact(RECORD_LEN).filter_map(|r| places(r).ok());
        if !are_disjoint(places.map(|p| p[i].clone())) {
            return Err(Error::corrupt(format!("{what} of two tensors overlap")));
        }
    }
    Ok(())
}

/// The ranges of a record's name, in bytes of the names, its shape, in dimensions, and its block,
/// in bytes of the object.
fn places(record: &[u8]) -> Result<[Range<u64>; 3]> {
    let mut c = Cursor::new(record);
    let (name, name_len) = (u64::from(c.u32()?), u64::from(c.u16()?));
    let (_, rank, dims) = (c.u8()?, u64::from(c.u8()?), u64::from(c.u32()?));
    let (_, _, kind) = (c.u16()?, c.u8()?, c.u8()?);
    let (block, len) = (c.u64()?, u64::from(c.u32()?));
    let len = if kind == 1 { 0 } else { len };
    Ok([name..name + name_len, dims..dims + rank, block..block.saturating_add(len)])
}

struct Pools<'a> {
    dims: &'a [u8],
    names: &'a [u8],
}

fn parse_record(record: &[u8], pools: &Pools<'_>) -> Result<Tensor> {
    let mut c = Cursor::new(record);
    let (name_at, name_len) = (c.u32()? as usize, c.u16()? as usize);
    let (dtype, rank) = (DType::from_code(c.u8()?)?, c.u8()? as usize);
    let (dims_at, plan) = (c.u32()? as usize, c.u16()?);
    let (chunk_log2, kind) = (c.u8()?, c.u8()?);
    let (place, aux, crc) = (c.u64()?, c.u32()?, c.u32()?);
    if rank > MAX_RANK || name_len > MAX_NAME {
        return Err(Error::limit(format!(
            "rank is {rank} (at most {MAX_RANK} allowed), name has {name_len} bytes (at most {MAX_NAME} allowed)"
        )));
    }
    let name = pools.names.get(name_at..name_at + name_len);
    let name = name.ok_or_else(|| Error::corrupt("name lies outside the pool of names"))?;
    let name = std::str::from_utf8(name).map_err(|_| Error::corrupt("name is not UTF-8"))?;
    let dims = dims_at.checked_mul(8).and_then(|at| pools.dims.get(at..at.checked_add(rank * 8)?));
    let dims = dims.ok_or_else(|| Error::corrupt("shape lies outside the pool of dimensions"))?;
    let mut d = Cursor::new(dims);
    let shape = (0..rank).map(|_| d.u64()).collect::<Result<_>>()?;
    let kind = match kind {
        0 | 2 => TensorKind::Chunks {
            block: Block { offset: place, len: aux, crc },
            chunk_log2,
            pack: kind == 2,
        },
        1 => TensorKind::Packed { pack: aux, first: place },
        k => return Err(Error::unsupported(format!("unknown tensor kind {k}"))),
    };
    // A packed tensor's plan is its pack's; the field may hold anything.
    let plan = if matches!(kind, TensorKind::Packed { .. }) { 0 } else { plan };
    Ok(Tensor { name: name.to_owned(), dtype, shape, plan, kind })
}

fn check_record(t: &Tensor, end: u64, plans: usize) -> Result<()> {
    let values = t.values()?;
    if t.name.contains('\0') {
        return Err(Error::corrupt("name contains NUL"));
    }
    if let TensorKind::Chunks { block, chunk_log2, pack } = t.kind {
        if t.name.is_empty() != pack {
            return Err(Error::corrupt("a pack has a name, or a tensor has none"));
        }
        if !CHUNK_LOG2.contains(&chunk_log2) {
            return Err(Error::limit(format!(
                "chunks have 2^{chunk_log2} values, 2^16 to 2^18 allowed"
            )));
        }
        if usize::from(t.plan) >= plans {
            return Err(Error::corrupt(format!(
                "plan {} does not exist (number of plans: {plans})",
                t.plan
            )));
        }
        if block.offset.checked_add(u64::from(block.len)).is_none_or(|e| e > end) {
            return Err(Error::corrupt("block lies outside the file"));
        }
        let table = chunk_count(values, chunk_log2).checked_mul(ChunkRecord::SIZE as u64);
        let side = table.and_then(|t| u64::from(block.len).checked_sub(t));
        if side.is_none_or(|s| s > MAX_SIDE as u64) {
            return Err(Error::corrupt("block size does not match its chunk table"));
        }
    } else if t.name.is_empty() {
        return Err(Error::corrupt("tensor has no name"));
    }
    Ok(())
}

fn check_relations(t: &Tensor, all: &[Tensor]) -> Result<()> {
    let TensorKind::Packed { pack, first } = t.kind else { return Ok(()) };
    let host = all.get(pack as usize);
    let host = host.filter(|h| matches!(h.kind, TensorKind::Chunks { pack: true, .. }));
    let host = host.ok_or_else(|| Error::corrupt(format!("tensor {pack} is not a pack")))?;
    let fits = first.checked_add(t.values()?).is_some_and(|e| host.values().is_ok_and(|v| e <= v));
    if host.dtype.value_width() != t.dtype.value_width() || !fits {
        return Err(Error::corrupt(format!("tensor does not fit in pack {pack}")));
    }
    Ok(())
}

/// Number of chunks of `values` values.
pub fn chunk_count(values: u64, chunk_log2: u8) -> u64 {
    values.div_ceil(1 << chunk_log2)
}

/// Checks the checksum of a tensor's block, and splits it into side data and chunk table.
///
/// # Errors
/// `Corrupt` if `bytes` is not the block or its checksum differs.
pub fn split_block<'a>(
    bytes: &'a [u8],
    block: &Block,
    chunks: u64,
) -> Result<(&'a [u8], &'a [u8])> {
    if bytes.len() != block.len as usize || crate::crc32c(bytes) != block.crc {
        return Err(Error::corrupt("checksum mismatch").in_part("chunk table"));
    }
    let table = usize::try_from(chunks).ok().and_then(|c| c.checked_mul(ChunkRecord::SIZE));
    let split = table.and_then(|t| bytes.len().checked_sub(t));
    let split = split.ok_or_else(|| Error::corrupt("block is too short").in_part("chunk table"))?;
    Ok(bytes.split_at(split))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Vec<Tensor> {
        let block = Block { offset: 100, len: 2 * 24 + 16, crc: 7 };
        vec![
            Tensor {
                name: "model.wte.weight".into(),
                dtype: DType::BFloat16,
                shape: vec![400, 200],
                plan: 1,
                kind: TensorKind::Chunks { block, chunk_log2: 16, pack: false },
            },
            Tensor {
                name: String::new(),
                dtype: DType::Float32,
                shape: vec![100],
                plan: 0,
                kind: TensorKind::Chunks {
                    block: Block { offset: 200, len: 24, crc: 9 },
                    chunk_log2: 16,
                    pack: true,
                },
            },
            Tensor {
                name: "ln.weight".into(),
                dtype: DType::Float32,
                shape: vec![60],
                plan: 0,
                kind: TensorKind::Packed { pack: 1, first: 40 },
            },
            Tensor {
                name: "empty".into(),
                dtype: DType::Complex64,
                shape: vec![u64::MAX, 0],
                plan: 0,
                kind: TensorKind::Chunks {
                    block: Block { offset: 0, len: 0, crc: 0 },
                    chunk_log2: 16,
                    pack: false,
                },
            },
        ]
    }

    #[test]
    fn tables_round_trip() {
        let bytes = write_table(&sample()).unwrap();
        assert_eq!(parse_table(&bytes, 1000, 2).unwrap(), sample());
        assert!(matches!(parse_table(&bytes, 150, 2), Err(Error::Corrupt { .. })));
        assert!(matches!(parse_table(&bytes, 1000, 1), Err(Error::Corrupt { .. })));
    }

    #[test]
    fn every_truncation_is_an_error_and_no_flip_panics() {
        let bytes = write_table(&sample()).unwrap();
        for cut in 0..bytes.len() {
            assert!(parse_table(&bytes[..cut], 1000, 2).is_err(), "cut {cut}");
        }
        for bit in 0..bytes.len() * 8 {
            let mut b = bytes.clone();
            b[bit / 8] ^= 1 << (bit % 8);
            if let Ok(t) = parse_table(&b, 1000, 2) {
                assert_eq!(t.len(), sample().len());
            }
        }
    }

    #[test]
    fn absurd_counts_allocate_nothing() {
        let mut bytes = write_table(&sample()).unwrap();
        bytes[0..4].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(matches!(parse_table(&bytes, 1000, 2), Err(Error::Limit { .. })));
        bytes[0..4].copy_from_slice(&(1u32 << 22).to_le_bytes());
        assert!(matches!(parse_table(&bytes, 1000, 2), Err(Error::Truncated { .. })));
    }

    #[test]
    fn names_and_shapes_that_overlap_are_refused() {
        let table = |change: fn(&mut [u8])| {
            let mut bytes = write_table(&sample()).unwrap();
            change(&mut bytes[TABLE_HEADER_LEN..][2 * RECORD_LEN..][..RECORD_LEN]);
            parse_table(&bytes, 1000, 2)
        };
        assert!(table(|_| ()).is_ok());
        // The third name becomes a part of the first one, `model.wte.weight`.
        let e = table(|r| r[0..6].copy_from_slice(&[9, 0, 0, 0, 3, 0])).unwrap_err().to_string();
        assert!(e.contains("names of two tensors overlap"), "{e}");
        let e = table(|r| r[8..12].copy_from_slice(&[2, 0, 0, 0])).unwrap_err().to_string();
        assert!(e.contains("shapes of two tensors overlap"), "{e}");
    }

    #[test]
    fn the_plan_of_a_packed_tensor_is_ignored() {
        let mut bytes = write_table(&sample()).unwrap();
        bytes[TABLE_HEADER_LEN..][2 * RECORD_LEN..][12..14].fill(0xff);
        assert_eq!(parse_table(&bytes, 1000, 2).unwrap(), sample());
    }

    #[test]
    fn parts_of_tensors_may_lie_in_any_order() {
        let mut bytes = write_table(&sample()).unwrap();
        // The shapes of the first and the third record, 2 dimensions and 1 of 4, are swapped.
        let at = TABLE_HEADER_LEN + 4 * RECORD_LEN;
        bytes[at..at + 32].rotate_left(24);
        for (record, first) in [(0, 1), (1, 3), (2, 0)] {
            let at = TABLE_HEADER_LEN + record * RECORD_LEN + 8;
            bytes[at..at + 4].copy_from_slice(&u32::to_le_bytes(first));
        }
        assert_eq!(parse_table(&bytes, 1000, 2).unwrap(), sample());
    }

    #[test]
    fn bad_relations_are_refused() {
        let refused = |f: fn(&mut Vec<Tensor>)| {
            let mut t = sample();
            f(&mut t);
            parse_table(&write_table(&t).unwrap(), 1000, 2).unwrap_err()
        };
        refused(|t| t[2].kind = TensorKind::Packed { pack: 0, first: 0 });
        refused(|t| t[2].kind = TensorKind::Packed { pack: 1, first: 41 });
        refused(|t| t[2].kind = TensorKind::Packed { pack: 9, first: 0 });
        refused(|t| t[2].dtype = DType::Int8);
        refused(|t| t[2].name = t[0].name.clone());
        refused(|t| t[0].name.clear());
        let e = refused(|t| {
            let TensorKind::Chunks { block, .. } = &mut t[1].kind else { panic!() };
            block.offset = 100 + 2 * 24 + 15;
        });
        assert!(e.to_string().contains("blocks"), "{e}");
        refused(|t| t[0].shape[0] *= 2);
        assert!(
            write_table(&[Tensor { shape: vec![1 << 40, 1 << 40], ..sample()[0].clone() }])
                .is_err()
        );
    }
}
