//! Chunks: the record that locates one, and the header that describes its contents.

use crate::digest::crc32c_of_parts;
use crate::error::{Error, Result};
use crate::id::CodecId;
use crate::layout::MAX_PLANES;
use crate::limits::{ALIGN, MAX_CHUNK_BYTES};
use crate::wire::Cursor;

/// The place and length of a chunk, and the checksums that its bytes must have. 24 bytes in a chunk
/// table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkRecord {
    /// Offset of the first byte within the object.
    pub offset: u64,
    /// Index of the object in the manifest's list.
    pub object: u32,
    /// Bytes on disk, at most [`MAX_CHUNK_BYTES`].
    pub len: u32,
    /// Whether the frame is the bare values, without header and streams.
    pub plain: bool,
    /// CRC-32C of the chunk's header followed by its streams that are not `raw`
    /// ([`StreamList::crc`]): all that a decoder interprets. The bytes of `raw` streams are covered
    /// by the checksum of the values. If `plain`, the same as `crc_raw`.
    pub crc_encoded: u32,
    /// CRC-32C of the values' bytes.
    pub crc_raw: u32,
}

const PLAIN: u32 = 1 << 31;
const _: () = assert!((MAX_CHUNK_BYTES as u64) < PLAIN as u64);

impl ChunkRecord {
    /// Bytes of a record.
    pub const SIZE: usize = 24;

    /// Appends the record.
    pub fn write(&self, out: &mut Vec<u8>) {
        out.extend(self.offset.to_le_bytes());
        out.extend(self.object.to_le_bytes());
        out.extend((self.len | if self.plain { PLAIN } else { 0 }).to_le_bytes());
        out.extend(self.crc_encoded.to_le_bytes());
        out.extend(self.crc_raw.to_le_bytes());
    }

    /// Reads a table of records that fills `bytes` exactly.
    ///
    /// # Errors
    /// `Corrupt` if the size is not a multiple of a record's, `Limit` if a record's length is above
    /// [`MAX_CHUNK_BYTES`].
    pub fn parse_table(bytes: &[u8]) -> Result<Vec<Self>> {
        if !bytes.len().is_multiple_of(Self::SIZE) {
            return Err(
                Error::corrupt("size is not a multiple of the record size").in_part("chunk table")
            );
        }
        let mut c = Cursor::new(bytes);
        let mut table = Vec::with_capacity(bytes.len() / Self::SIZE);
        for i in 0..bytes.len() / Self::SIZE {
            let (offset, object, len) = (c.u64()?, c.u32()?, c.u32()?);
            let record = Self {
                offset,
                object,
                len: len & !PLAIN,
                plain: len & PLAIN != 0,
                crc_encoded: c.u32()?,
                crc_raw: c.u32()?,
            };
            if record.len as usize > MAX_CHUNK_BYTES {
                let what =
                    format!("chunk has {} bytes, at most {MAX_CHUNK_BYTES} allowed", record.len);
                return Err(Error::limit(what).in_part("chunk table").in_chunk(i as u64));
            }
            table.push(record);
        }
        Ok(table)
    }
}

/// One stream in a chunk's header: 8 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamEntry {
    /// The bitstream.
    pub codec: CodecId,
    /// The codec's own 8-bit parameter.
    pub param: u8,
    /// Bytes of the stream.
    pub len: u32,
}

impl StreamEntry {
    /// Bytes of an entry.
    pub const SIZE: usize = 8;

    /// Bytes of the header of a chunk with `streams` streams: where the first stream starts.
    pub fn header_len(streams: usize) -> usize {
        (streams * Self::SIZE).next_multiple_of(ALIGN)
    }

    /// Writes the header of a chunk into the start of `out`.
    ///
    /// # Panics
    /// If `out` is shorter than [`StreamEntry::header_len`].
    pub fn write_header(entries: &[Self], out: &mut [u8]) {
        let out = &mut out[..Self::header_len(entries.len())];
        out.fill(0);
        for (e, o) in entries.iter().zip(out.chunks_exact_mut(Self::SIZE)) {
            o[0] = e.codec.0;
            o[1] = e.param;
            o[4..8].copy_from_slice(&e.len.to_le_bytes());
        }
    }

    /// Reads the header of a chunk and finds its streams: the entry and the bytes of each.
    ///
    /// # Errors
    /// `Truncated` or `Corrupt` if header and streams do not fill the chunk exactly; `Limit` for
    /// more than [`MAX_PLANES`] streams.
    pub fn parse_chunk(chunk: &[u8], streams: usize) -> Result<StreamList<'_>> {
        let places = Self::places(chunk, streams, chunk.len())?;
        let mut list = StreamList { chunk, items: [(Self::EMPTY, &[]); MAX_PLANES], len: streams };
        let mut at = Self::header_len(streams);
        for (i, &(entry, start, end)) in places[..streams].iter().enumerate() {
            if chunk[at..start].iter().any(|&b| b != 0) {
                return Err(Error::corrupt("padding before the stream is not zero")
                    .in_part("chunk header")
                    .in_stream(i));
            }
            list.items[i] = (entry, &chunk[start..end]);
            at = end;
        }
        Ok(list)
    }

    /// Reads the header of a chunk of `len` bytes, of which `head` has at least the first [`StreamEntry::header_len`].
    ///
    /// # Errors
    /// As [`StreamEntry::parse_chunk`], except that bytes between streams are not seen.
    pub fn parse_header(head: &[u8], streams: usize, len: usize) -> Result<Vec<Self>> {
        let places = Self::places(head, streams, len)?;
        Ok(places[..streams].iter().map(|(entry, ..)| *entry).collect())
    }

    /// The entries of a header, and the start and end of each stream in a chunk of `len` bytes, which they fill.
    fn places(
        head: &[u8],
        streams: usize,
        len: usize,
    ) -> Result<[(Self, usize, usize); MAX_PLANES]> {
        if streams > MAX_PLANES {
            return Err(Error::limit(format!(
                "chunk has {streams} streams, at most {MAX_PLANES} allowed"
            )));
        }
        let mut c = Cursor::new(head);
        let mut out = [(Self::EMPTY, 0, 0); MAX_PLANES];
        for (entry, ..) in &mut out[..streams] {
            let (codec, param, reserved) = (CodecId(c.u8()?), c.u8()?, c.u16()?);
            if reserved != 0 {
                return Err(Error::corrupt("reserved bits are set").in_part("chunk header"));
            }
            *entry = Self { codec, param, len: c.u32()? };
        }
        let mut at = Self::header_len(streams);
        for (i, (entry, start, end)) in out[..streams].iter_mut().enumerate() {
            *start = at.next_multiple_of(ALIGN);
            at =
                start.checked_add(entry.len as usize).filter(|&at| at <= len).ok_or_else(|| {
                    Error::truncated(format!(
                        "stream of {} bytes extends past the end of the chunk",
                        entry.len
                    ))
                    .in_part("chunk header")
                    .in_stream(i)
                })?;
            *end = at;
        }
        if at != len {
            let what = format!("{} unexpected bytes after the last stream", len.saturating_sub(at));
            return Err(Error::corrupt(what).in_part("chunk header"));
        }
        Ok(out)
    }

    const EMPTY: Self = Self { codec: CodecId::RAW, param: 0, len: 0 };
}

/// The streams of a chunk.
#[derive(Debug, Clone, Copy)]
pub struct StreamList<'a> {
    chunk: &'a [u8],
    items: [(StreamEntry, &'a [u8]); MAX_PLANES],
    len: usize,
}

impl<'a> StreamList<'a> {
    /// Entry and bytes of each stream.
    pub fn items(&self) -> &[(StreamEntry, &'a [u8])] {
        &self.items[..self.len]
    }

    /// CRC-32C of the header and of the streams that are not `raw`, without the gaps between them.
    /// It must equal [`ChunkRecord::crc_encoded`].
    pub fn crc(&self) -> u32 {
        let coded = self.items().iter().filter(|(entry, _)| entry.codec != CodecId::RAW);
        let header = &self.chunk[..StreamEntry::header_len(self.len)];
        crc32c_of_parts(std::iter::once(header).chain(coded.map(|(_, bytes)| *bytes)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_round_trip() {
        let r = ChunkRecord {
            offset: 1 << 40,
            object: 3,
            len: 87_000,
            plain: true,
            crc_encoded: 5,
            crc_raw: 6,
        };
        let mut bytes = vec![];
        r.write(&mut bytes);
        assert_eq!(bytes.len(), ChunkRecord::SIZE);
        assert_eq!(ChunkRecord::parse_table(&bytes).unwrap(), [r]);
        assert!(ChunkRecord::parse_table(&bytes[1..]).is_err());
        bytes[14] = 0x7f;
        assert!(matches!(ChunkRecord::parse_table(&bytes), Err(Error::Limit { .. })));
    }

    #[test]
    fn chunk_headers_must_fill_the_chunk() {
        let entries = [
            StreamEntry { codec: CodecId::RANS, param: 8, len: 20 },
            StreamEntry { codec: CodecId::RAW, param: 0, len: 3 },
            StreamEntry { codec: CodecId::CONST, param: 0, len: 0 },
        ];
        let mut chunk = vec![0; 32 + 32 + 16];
        chunk[32..52].fill(5);
        chunk[64..67].fill(7);
        StreamEntry::write_header(&entries, &mut chunk);
        let list = StreamEntry::parse_chunk(&chunk, 3).unwrap();
        assert_eq!(list.items()[1], (entries[1], &[7u8; 3][..]));
        assert!(list.items()[2].1.is_empty());
        for head in [&chunk[..32], &chunk[..]] {
            assert_eq!(StreamEntry::parse_header(head, 3, chunk.len()).unwrap(), entries);
            assert!(StreamEntry::parse_header(head, 3, chunk.len() + 1).is_err());
            assert!(StreamEntry::parse_header(head, 3, chunk.len() - 1).is_err());
        }
        assert!(StreamEntry::parse_header(&chunk[..23], 3, chunk.len()).is_err());
        // The header, then streams 0 and 2: neither the raw stream nor the gaps.
        let mut covered = chunk[..52].to_vec();
        assert_eq!(list.crc(), crate::crc32c(&covered));
        covered[0] ^= 1;
        assert_ne!(list.crc(), crate::crc32c(&covered));
        chunk[53] = 1;
        assert!(StreamEntry::parse_chunk(&chunk, 3).is_err());
        chunk[53] = 0;
        for cut in 0..chunk.len() {
            assert!(StreamEntry::parse_chunk(&chunk[..cut], 3).is_err(), "cut {cut}");
        }
        chunk.push(0);
        assert!(StreamEntry::parse_chunk(&chunk, 3).is_err());
    }
}
