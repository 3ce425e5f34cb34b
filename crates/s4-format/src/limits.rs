//! Limits of the format: writers write nothing larger, and readers refuse anything larger.

/// Values in a chunk: `2^16` at least (except the last of a tensor), `2^18` at most.
pub const CHUNK_LOG2: std::ops::RangeInclusive<u8> = 16..=18;
/// Bytes of an encoded chunk: the largest raw chunk (`2^18` values of 8 bytes) and its header.
pub const MAX_CHUNK_BYTES: usize = (8 << 18) + 4096;
/// Alignment of chunks within an object and of streams within a chunk, in bytes.
pub const ALIGN: usize = 16;
/// Records of a tensor table.
pub const MAX_TENSORS: usize = 1 << 22;
/// Bytes of a tensor's name, in UTF-8 without NUL.
pub const MAX_NAME: usize = 4096;
/// Dimensions of a tensor.
pub const MAX_RANK: usize = 64;
/// Bytes of a manifest.
pub const MAX_MANIFEST: u64 = 256 << 20;
/// Bytes of a tensor table.
pub const MAX_TENSOR_TABLE: u64 = 1 << 30;
/// Bytes of the side data of one tensor.
pub const MAX_SIDE: usize = 64 << 20;
/// Bytes of a tensor.
pub const MAX_TENSOR_BYTES: u64 = 1 << 46;
/// Longest path from a tensor through the inputs of its plan, within one checkpoint.
pub const MAX_DEPENDENCY_DEPTH: usize = 4;
/// Longest chain of checkpoints: a base and its descendants.
pub const MAX_CHAIN: usize = 64;
/// Depth of a checkpoint whose contexts come from moments: a reader needs each ancestor's moments, too.
pub const MAX_UPDATES: u32 = 16;
/// Objects of a checkpoint.
pub const MAX_OBJECTS: usize = 1 << 20;
/// rANS tables of one stream.
pub const MAX_TABLES: usize = 16;
/// Entries of a manifest's metadata, and blobs of a manifest.
pub const MAX_ENTRIES: usize = 1 << 18;
/// Groups of a manifest's role table and their scalars, together.
pub const MAX_SCALARS: usize = 1 << 18;
/// Inputs of a plan.
pub const MAX_INPUTS: usize = 16;
