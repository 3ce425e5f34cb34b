//! `testdata/refuse`: files that every reader must refuse, and why.
//!
//! Each is a small good file with one thing changed and all checksums corrected, so that only the
//! broken rule gives it away. `S4_WRITE_VECTORS=<folder>` keeps the files.

use s4weights::format::file::{FOOTER_LEN, Footer};
use s4weights::format::{ChunkRecord, Digest, Error as FormatError, StreamEntry, crc32c};
use s4weights::{DType, Error, WriteOptions};
use serde::{Deserialize, Serialize};

use crate::golden_cpu::kept;
use crate::{Owned, common, repository, save};

/// A file of the list.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Case {
    file: String,
    /// `corrupt`, `truncated`, `unsupported` or `limit`.
    error: String,
    why: String,
}

/// A good file taken apart, for a case to change before it is put together again.
struct Parts {
    /// Header, chunks and blocks.
    data: Vec<u8>,
    table: Vec<u8>,
    manifest: String,
    /// Where the object with the chunks ends.
    object: usize,
    old: [Digest; 2],
    /// Original length of the table, in bytes.
    old_len: u64,
}

/// Offset of the first record in the tensor table, and bytes of a record.
const RECORDS: usize = 16;
const RECORD: usize = 32;

impl Parts {
    fn new(file: &[u8]) -> Self {
        let footer = Footer::parse(file, file.len() as u64).unwrap();
        let at = footer.offset as usize;
        let json = &file[at..at + footer.len as usize];
        let manifest = s4weights::Manifest::parse(json, footer.offset).unwrap();
        let section = manifest.tensors.section;
        let start = section.offset as usize;
        assert_eq!(start + section.bytes as usize, at, "the table is the last thing");
        Self {
            data: file[..start].to_vec(),
            table: file[start..at].to_vec(),
            manifest: String::from_utf8(json.to_vec()).unwrap(),
            object: manifest.objects[0].bytes as usize,
            old: [manifest.objects[0].blake3, section.blake3],
            old_len: section.bytes,
        }
    }

    /// The whole file, with every checksum over changed bytes corrected.
    fn build(mut self) -> Vec<u8> {
        let [object, table] = self.old.map(|d| d.to_string());
        let now = Digest::of(&self.data[..self.object]).to_string();
        self.manifest = self.manifest.replace(&object, &now);
        let section = |len: u64, hash: &str| format!(r#""bytes":{len},"blake3":"{hash}""#);
        let now = section(self.table.len() as u64, &Digest::of(&self.table).to_string());
        self.manifest = self.manifest.replace(&section(self.old_len, &table), &now);
        let offset = (self.data.len() + self.table.len()) as u64;
        let (len, digest) = (self.manifest.len() as u64, Digest::of(self.manifest.as_bytes()));
        let mut file = self.data;
        file.extend(self.table);
        file.extend(self.manifest.as_bytes());
        file.extend(Footer { offset, len, digest }.to_bytes());
        file
    }

    /// Adds a plan, and a parent of depth 16.
    fn at_depth_17(&mut self, plan: &str) {
        self.json(NO_PLAN, &format!("{NO_PLAN},{plan}"));
        let hash = Digest::of(b"").to_string();
        let parent = format!(r#""form":"tensors","parent":{{"manifest":"{hash}","depth":16}}"#);
        self.json(r#""form":"tensors""#, &parent);
    }

    fn json(&mut self, from: &str, to: &str) {
        assert!(self.manifest.contains(from), "{from} in {}", self.manifest);
        self.manifest = self.manifest.replacen(from, to, 1);
    }

    /// Changes bytes of a record of the tensor table.
    fn record(&mut self, number: usize, field: usize, bytes: &[u8]) {
        let at = RECORDS + number * RECORD + field;
        self.table[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Adds dimensions after all others; returns the index of the first.
    fn add_dimensions(&mut self, dims: &[u64]) -> u8 {
        let field = |at: usize| u32::from_le_bytes(self.table[at..at + 4].try_into().unwrap());
        let (records, before) = (field(0) as usize, field(4));
        let end = RECORDS + records * RECORD + before as usize * 8;
        self.table.splice(end..end, dims.iter().flat_map(|d| d.to_le_bytes()));
        let after = before + u32::try_from(dims.len()).unwrap();
        self.table[4..8].copy_from_slice(&after.to_le_bytes());
        u8::try_from(before).unwrap()
    }

    /// Offset and length of a record's block.
    fn place(&self, number: usize) -> (usize, usize) {
        let record = RECORDS + number * RECORD;
        let field = |at: usize| u32::from_le_bytes(self.table[at..at + 4].try_into().unwrap());
        (field(record + 16) as usize, field(record + 24) as usize)
    }

    /// Makes chunk `to` point to the frame of chunk `from`, which has the same bytes. Both are the
    /// index of a record and of a chunk in it.
    fn share_chunk(&mut self, from: (usize, usize), to: (usize, usize)) {
        let read = |(record, number): (usize, usize)| {
            let (offset, len) = self.place(record);
            let table = &self.data[offset..offset + len];
            (ChunkRecord::parse_table(table).unwrap()[number], number * 24)
        };
        let ((first, _), (second, at)) = (read(from), read(to));
        assert_eq!(first, ChunkRecord { offset: first.offset, ..second }, "they are alike");
        self.block(to.0, at, &first.offset.to_le_bytes());
    }

    /// Changes bytes of a block, and its checksum in the record.
    fn block(&mut self, number: usize, at: usize, bytes: &[u8]) {
        let (offset, len) = self.place(number);
        self.data[offset + at..offset + at + bytes.len()].copy_from_slice(bytes);
        let crc = crc32c(&self.data[offset..offset + len]);
        self.record(number, 28, &crc.to_le_bytes());
    }

    /// Changes bytes of the only chunk, and the first checksum of its record.
    fn chunk(&mut self, at: usize, bytes: &[u8]) {
        let record = ChunkRecord::parse_table(&self.data[self.data.len() - 24..]).unwrap()[0];
        let (start, end) = (record.offset as usize, record.offset as usize + record.len as usize);
        let streams = if record.plain { 0 } else { 3 };
        let good = StreamEntry::parse_chunk(&self.data[start..end], streams);
        let lens: Vec<usize> =
            good.map(|l| l.items().iter().map(|s| s.1.len()).collect()).unwrap_or_default();
        self.data[start + at..start + at + bytes.len()].copy_from_slice(bytes);
        if record.plain {
            return;
        }
        // The header, and every stream in its place: this file has no `raw` stream.
        let mut covered = self.data[start..start + 32].to_vec();
        let mut from = start + 32;
        for len in lens {
            covered.extend(&self.data[from..from + len]);
            from = start + (from + len - start).next_multiple_of(16);
        }
        self.block(0, 16, &crc32c(&covered).to_le_bytes());
    }
}

type Change = fn(&mut Parts);

/// The small file's only plan.
const NO_PLAN: &str = r#"{"predictor":0,"residual":0,"layout":3}"#;

/// A plan with contexts `update` and these moments.
fn update_plan(moments: &[u32]) -> String {
    let plan = r#"{"predictor":1,"residual":4,"layout":1"#;
    format!(r#"{plan},"inputs":{},"contexts":2}}"#, inputs(moments))
}

/// A plan with predictor `step` and these moments.
fn step_plan(moments: &[u32]) -> String {
    format!(r#"{{"predictor":6,"residual":2,"layout":1,"inputs":{}}}"#, inputs(moments))
}

/// A plan with predictor `same` whose input has another member.
fn same_plan(member: &str) -> String {
    let input = format!(r#"{{"tensor":0,{member}}}"#);
    format!(r#"{{"predictor":2,"residual":1,"layout":2,"inputs":[{input}]}}"#)
}

/// A parent's tensor, and these moments.
fn inputs(moments: &[u32]) -> String {
    let own: String = moments.iter().map(|n| format!(r#",{{"tensor":{n}}}"#)).collect();
    format!(r#"[{{"manifest":"{}","tensor":0}}{own}]"#, Digest::of(b""))
}

/// Cases of the small file: four bfloat16 values in a pack, one plain chunk.
const PLAIN: &[(&str, &str, &str, Change)] = &[
    (
        "manifest-unknown-member",
        "corrupt",
        "the manifest has a member that 0.2 does not name",
        |p| {
            p.json(r#""form":"#, r#""extra":1,"form":"#);
        },
    ),
    ("manifest-member-twice", "corrupt", "the manifest has `form` twice", |p| {
        p.json(r#""form":"#, r#""form":"tensors","form":"#);
    }),
    ("manifest-name-twice", "corrupt", "`metadata` has one name twice", |p| {
        let metadata = r#""form":"tensors","metadata":{"a":"1","a":"2"}"#;
        p.json(r#""form":"tensors""#, metadata);
    }),
    ("manifest-hash-upper-case", "corrupt", "a hash in upper-case digits", |p| {
        let hash = Digest::of(b"").to_string().to_uppercase();
        p.json(
            r#""objects":["#,
            &format!(r#""objects":[{{"name":"0","bytes":0,"blake3":"{hash}"}},"#),
        );
    }),
    ("manifest-other-version", "unsupported", "`format` is [0,3]", |p| {
        p.json(r#""format":[0,2]"#, r#""format":[0,3]"#);
    }),
    ("manifest-float-size", "corrupt", "the number of bytes is written as 32.0", |p| {
        p.json(r#""bytes":32"#, r#""bytes":32.0"#);
    }),
    ("manifest-tree-missing", "corrupt", "`form` is `tree` and there is no `tree`", |p| {
        p.json(r#""form":"tensors""#, r#""form":"tree""#);
    }),
    ("manifest-pickle-missing", "corrupt", "`form` is `pickle` and there is no such blob", |p| {
        p.json(r#""form":"tensors""#, r#""form":"pickle""#);
    }),
    (
        "manifest-section-outside",
        "corrupt",
        "a blob reaches beyond the start of the manifest",
        |p| {
            let hash = Digest::of(b"").to_string();
            let blob = format!(
                r#""form":"tensors","blobs":{{"b":{{"offset":99999,"bytes":0,"blake3":"{hash}"}}}}"#
            );
            p.json(r#""form":"tensors""#, &blob);
        },
    ),
    ("manifest-sections-overlap", "corrupt", "a blob and the tensor table share a byte", |p| {
        let (offset, hash) = (p.data.len(), Digest::of(&p.table[..1]));
        let blob = format!(
            r#""form":"tensors","blobs":{{"b":{{"offset":{offset},"bytes":1,"blake3":"{hash}"}}}}"#
        );
        p.json(r#""form":"tensors""#, &blob);
    }),
    ("manifest-two-own-objects", "corrupt", "two objects have no name", |p| {
        let hash = Digest::of(b"").to_string();
        p.json(r#""objects":["#, &format!(r#""objects":[{{"bytes":0,"blake3":"{hash}"}},"#));
    }),
    ("manifest-parent-of-depth-0", "corrupt", "the parent's depth is 0", |p| {
        let hash = Digest::of(b"").to_string();
        let parent = format!(r#""form":"tensors","parent":{{"manifest":"{hash}","depth":0}}"#);
        p.json(r#""form":"tensors""#, &parent);
    }),
    ("manifest-chain-too-long", "limit", "the parent's depth is 64", |p| {
        let hash = Digest::of(b"").to_string();
        let parent = format!(r#""form":"tensors","parent":{{"manifest":"{hash}","depth":64}}"#);
        p.json(r#""form":"tensors""#, &parent);
    }),
    ("manifest-closed-codec-is-open", "corrupt", "`closed_codecs` lists codec 4, `zstd`", |p| {
        let listed = r#""form":"tensors","closed_codecs":[{"codec":4,"library_major":1}]"#;
        p.json(r#""form":"tensors""#, listed);
    }),
    ("plan-unknown-predictor", "unsupported", "predictor 9 is unknown", |p| {
        p.json(r#""predictor":0"#, r#""predictor":9"#);
    }),
    ("plan-unknown-contexts", "unsupported", "contexts 9 are unknown", |p| {
        p.json(r#""layout":3"#, r#""layout":3,"contexts":9"#);
    }),
    ("plan-contexts-of-values", "corrupt", "contexts `exponent` without a parent", |p| {
        p.json(r#""layout":3"#, r#""layout":3,"contexts":1"#);
    }),
    ("plan-rank1-sub", "corrupt", "predictor `rank1` with residual `sub`", |p| {
        p.json(r#""predictor":0,"residual":0"#, r#""predictor":4,"residual":2"#);
    }),
    ("plan-blend-without-input", "corrupt", "predictor `blend` without an input", |p| {
        p.json(r#""predictor":0,"residual":0"#, r#""predictor":5,"residual":3"#);
    }),
    ("plan-cast-without-input", "corrupt", "predictor `cast` without an input", |p| {
        p.json(r#""predictor":0,"residual":0"#, r#""predictor":3,"residual":1"#);
    }),
    ("plan-same-without-input", "corrupt", "predictor `same` without an input", |p| {
        p.json(r#""predictor":0,"residual":0"#, r#""predictor":2,"residual":1"#);
    }),
    ("plan-input-manifest-null", "corrupt", "the `manifest` of an input is null", |p| {
        p.json(NO_PLAN, &format!("{NO_PLAN},{}", same_plan(r#""manifest":null"#)));
    }),
    ("plan-input-region-null", "corrupt", "the `region` of an input is null", |p| {
        p.json(NO_PLAN, &format!("{NO_PLAN},{}", same_plan(r#""region":null"#)));
    }),
    ("plan-update-without-moments", "corrupt", "contexts `update` without a moment", |p| {
        p.json(NO_PLAN, &update_plan(&[]));
    }),
    ("plan-update-of-fields", "corrupt", "contexts `update` with layout `fields`", |p| {
        p.json(NO_PLAN, &update_plan(&[0, 0]).replace(r#""layout":1"#, r#""layout":2"#));
    }),
    ("plan-descent-without-contexts", "corrupt", "residual `descent` without contexts", |p| {
        p.json(NO_PLAN, &update_plan(&[0, 0]).replace(r#","contexts":2"#, ""));
    }),
    ("manifest-update-too-deep", "limit", "contexts `update` at depth 17", |p| {
        p.at_depth_17(&update_plan(&[0, 0]));
    }),
    ("plan-step-without-moments", "corrupt", "predictor `step` with one moment", |p| {
        p.json(NO_PLAN, &step_plan(&[0]));
    }),
    ("plan-step-xor", "corrupt", "predictor `step` with residual `xor`", |p| {
        p.json(NO_PLAN, &step_plan(&[0, 0]).replace(r#""residual":2"#, r#""residual":1"#));
    }),
    ("plan-step-with-contexts", "corrupt", "predictor `step` with contexts", |p| {
        p.json(NO_PLAN, &step_plan(&[0, 0]).replace("]}", r#"],"contexts":2}"#));
    }),
    ("manifest-step-too-deep", "limit", "predictor `step` at depth 17", |p| {
        p.at_depth_17(&step_plan(&[0, 0]));
    }),
    ("table-pack-has-inputs", "corrupt", "the pack's plan has an input", |p| {
        let plan = r#""predictor":3,"residual":1,"inputs":[{"tensor":0}]"#;
        p.json(r#""predictor":0,"residual":0"#, plan);
    }),
    ("plan-unknown-layout", "unsupported", "layout 9 is unknown", |p| {
        p.json(r#""layout":3"#, r#""layout":9"#);
    }),
    ("plan-none-xor", "corrupt", "predictor `none` with residual `xor`", |p| {
        p.json(r#""residual":0"#, r#""residual":1"#);
    }),
    ("plan-token-without-sub", "corrupt", "layout `token` without residual `sub`", |p| {
        p.json(r#""layout":3"#, r#""layout":4"#);
    }),
    ("plan-parent-without-input", "corrupt", "predictor `parent` without an input", |p| {
        p.json(r#""predictor":0,"residual":0"#, r#""predictor":1,"residual":1"#);
    }),
    (
        "plan-other-than-parent",
        "corrupt",
        "an input names a checkpoint that is not the parent",
        |p| {
            let hash = Digest::of(b"").to_string();
            let plan = format!(
                r#"{{"predictor":1,"residual":1,"inputs":[{{"manifest":"{hash}","tensor":0}}],"layout":0}},{{"predictor":0"#
            );
            p.json(r#"{"predictor":0"#, &plan);
        },
    ),
    ("table-count-differs", "corrupt", "the manifest counts 3 records, the table has 2", |p| {
        p.json(r#""count":2"#, r#""count":3"#);
    }),
    ("table-unknown-dtype", "unsupported", "dtype code 99", |p| p.record(0, 6, &[99])),
    ("table-unknown-kind", "unsupported", "kind 3 of a record", |p| p.record(0, 15, &[3])),
    ("table-name-outside", "corrupt", "a name reaches beyond the names", |p| p.record(0, 4, &[9])),
    ("table-name-empty", "corrupt", "a tensor that is no pack has no name", |p| {
        p.record(0, 4, &[0]);
    }),
    ("table-name-not-utf8", "corrupt", "a name is not UTF-8", |p| {
        *p.table.last_mut().unwrap() = 0xff
    }),
    ("table-name-nul", "corrupt", "a name holds NUL", |p| *p.table.last_mut().unwrap() = 0),
    ("table-shape-outside", "corrupt", "a shape reaches beyond the dimensions", |p| {
        p.record(0, 8, &[3]);
    }),
    ("table-rank-65", "limit", "65 dimensions", |p| {
        let first = p.add_dimensions(&[1; 65]);
        p.record(0, 7, &[65]);
        p.record(0, 8, &[first]);
    }),
    ("table-tensor-too-large", "limit", "a tensor of 2^62 elements", |p| {
        p.table[RECORDS + 2 * RECORD + 7] = 0x40;
    }),
    ("table-outside-pack", "corrupt", "a packed tensor reaches beyond its pack", |p| {
        p.record(0, 16, &[1]);
    }),
    ("table-no-such-pack", "corrupt", "a packed tensor names itself as its pack", |p| {
        p.record(0, 24, &[0]);
    }),
    ("table-pack-of-other-width", "corrupt", "pack and packed tensor differ in width", |p| {
        p.record(1, 6, &[20]);
    }),
    ("table-unknown-plan", "corrupt", "a record names plan 1 of 1", |p| p.record(1, 12, &[1])),
    ("table-pack-is-a-difference", "corrupt", "the plan of a pack predicts from the parent", |p| {
        let hash = Digest::of(b"").to_string();
        let input = format!(r#"[{{"manifest":"{hash}","tensor":0}}]"#);
        let plan = format!(r#"{{"predictor":1,"residual":1,"layout":0,"inputs":{input}}}"#);
        p.json(r#"}],"form""#, &format!(r#"}},{plan}],"form""#));
        let parent = format!(r#""form":"tensors","parent":{{"manifest":"{hash}","depth":1}}"#);
        p.json(r#""form":"tensors""#, &parent);
        p.record(1, 12, &[1]);
    }),
    ("table-chunks-too-short", "limit", "c is 15", |p| p.record(1, 14, &[15])),
    ("table-block-outside", "corrupt", "a block reaches beyond the start of the manifest", |p| {
        p.record(1, 17, &[0x10]);
    }),
    ("table-block-too-short", "corrupt", "a block is shorter than its chunk table", |p| {
        p.record(1, 24, &[23]);
    }),
    ("block-chunk-outside", "corrupt", "a chunk reaches beyond its object", |p| {
        p.block(1, 0, &[48]);
    }),
    ("block-no-such-object", "corrupt", "a chunk lies in object 1 of 1", |p| p.block(1, 8, &[1])),
    ("block-chunk-too-long", "limit", "a chunk of more than 2 MiB and 4 KiB", |p| {
        p.block(1, 12, &[0, 0, 0, 0x81]);
    }),
    ("chunk-plain-checksums-differ", "corrupt", "a plain chunk's two checksums differ", |p| {
        p.block(1, 16, &[0, 0, 0, 0]);
    }),
    ("chunk-plain-wrong-size", "corrupt", "a plain chunk of 6 bytes for 8", |p| {
        p.block(1, 12, &[6, 0, 0, 0x80]);
    }),
    ("chunk-values-damaged", "corrupt", "a value was changed", |p| p.chunk(0, &[0x81])),
];

/// Cases of a file with one coded chunk: an exponent plane in `rans`, at offset 32, two `const` planes.
const CODED: &[(&str, &str, &str, Change)] = &[
    ("chunk-unknown-codec", "unsupported", "codec 77", |p| p.chunk(0, &[77])),
    ("chunk-unlisted-closed-codec", "unsupported", "a closed codec that is not listed", |p| {
        p.chunk(0, &[128]);
    }),
    ("chunk-reserved-bytes", "corrupt", "reserved bytes of a stream entry are set", |p| {
        p.chunk(2, &[1]);
    }),
    ("chunk-stream-too-long", "truncated", "the streams reach beyond the chunk", |p| {
        p.chunk(20, &[2]);
    }),
    ("chunk-bytes-after-streams", "corrupt", "bytes after the last stream", |p| {
        p.chunk(20, &[0]);
    }),
    ("const-parameter", "unsupported", "codec `const` with parameter 1", |p| p.chunk(9, &[1])),
    ("rans-parameter", "unsupported", "P is 9", |p| p.chunk(1, &[9])),
    ("rans-symbols", "corrupt", "the number of symbols is not the plane's size", |p| {
        p.chunk(33, &[0x0f]);
    }),
    ("rans-lanes", "unsupported", "lanes_log2 is 4", |p| p.chunk(36, &[4])),
    ("rans-segment", "unsupported", "segment_log2 is 16", |p| p.chunk(37, &[16])),
    ("rans-no-tables", "corrupt", "no table", |p| p.chunk(38, &[0])),
    ("rans-flags", "unsupported", "bit 2 of flags is set", |p| p.chunk(39, &[4])),
    ("rans-no-shared-tables", "corrupt", "shared tables, of which the tensor has none", |p| {
        p.chunk(39, &[1]);
    }),
    ("rans-table-sum", "corrupt", "the frequencies do not add up to 256", |p| p.chunk(42, &[1])),
    ("rans-symbol-twice", "corrupt", "a symbol twice in a table", |p| p.chunk(44, &[126, 126])),
    ("rans-too-many-words", "truncated", "a segment has more words than the stream", |p| {
        p.chunk(49, &[0xff]);
    }),
    ("rans-state-too-small", "corrupt", "a state below 2^16 at the start", |p| {
        p.chunk(52, &[0xff, 0xff, 0, 0]);
    }),
    ("rans-end-state", "corrupt", "a state is not 2^16 at the end", |p| {
        let at = 32 + 20;
        let start = p.data.len() - 24;
        let record = ChunkRecord::parse_table(&p.data[start..]).unwrap()[0];
        let byte = p.data[record.offset as usize + at];
        p.chunk(at, &[byte ^ 1]);
    }),
];

/// Cases of a file with two tensors, `ab` and `cd`, each in a pack of its own (records 2 and 3):
/// two plain chunks of the same 8 bytes.
const PAIR: &[(&str, &str, &str, Change)] = &[
    ("table-name-twice", "corrupt", "two tensors have one name", |p| {
        let cd = p.table.len() - 2;
        p.table[cd..].copy_from_slice(b"ab");
    }),
    ("table-names-overlap", "corrupt", "the names of two tensors share a byte", |p| {
        p.record(1, 0, &[1]);
    }),
    ("table-shapes-overlap", "corrupt", "the shapes of two tensors share a dimension", |p| {
        p.record(1, 8, &[1]);
    }),
    ("table-blocks-overlap", "corrupt", "two packs have one block, and so one chunk", |p| {
        let first = RECORDS + 2 * RECORD;
        let block: [u8; 16] = p.table[first + 16..first + 32].try_into().unwrap();
        p.record(3, 16, &block);
    }),
    ("block-chunks-overlap", "corrupt", "the chunks of two packs are the same bytes", |p| {
        p.share_chunk((2, 0), (3, 0));
    }),
];

/// Cases of a file with one tensor of two identical coded chunks.
const ALIKE: &[(&str, &str, &str, Change)] =
    &[("block-chunk-twice", "corrupt", "two chunks of a tensor are the same bytes", |p| {
        p.share_chunk((0, 0), (0, 1));
    })];

/// Values whose exponents are 127 or 128, and whose other bits are 0.
fn coded_file() -> Vec<u8> {
    let mut x = 1u32;
    let values = (0..4096).flat_map(|_| {
        x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (if x >> 31 == 1 { 1f32 } else { 2f32 }).to_le_bytes()
    });
    let tensor = Owned::new("x", DType::Float32, &[4096], values.collect());
    save(&[tensor], WriteOptions::default())
}

fn plain_file() -> Vec<u8> {
    let data = [0x3f80u16, 0x3f80, 0xbf80, 0x4000].iter().flat_map(|v| v.to_le_bytes()).collect();
    save(&[Owned::new("w", DType::BFloat16, &[2, 2], data)], WriteOptions::default())
}

fn pair_file() -> Vec<u8> {
    let data = [0x80, 0x3f, 0x80, 0x3f, 0x80, 0xbf, 0, 0x40];
    let ab = Owned::new("ab", DType::BFloat16, &[2, 2], data.to_vec());
    let cd = Owned::new("cd", DType::Float32, &[1, 2], data.to_vec());
    save(&[ab, cd], WriteOptions::default())
}

fn alike_file() -> Vec<u8> {
    let values = Owned::new("x", DType::UInt8, &[2 << 18], vec![7; 2 << 18]);
    save(&[values], WriteOptions::default())
}

/// Cases whose checksums are not corrected.
fn damaged() -> Vec<(&'static str, &'static str, &'static str, Vec<u8>)> {
    let good = plain_file();
    let with = |at: usize, byte: u8| {
        let mut file = good.clone();
        file[at] = byte;
        file
    };
    let end = good.len();
    let mut longer = good.clone();
    longer.push(0);
    vec![
        ("empty", "truncated", "a file of no bytes", vec![]),
        ("header-magic", "corrupt", "the first byte is wrong", with(0, 0x88)),
        ("header-version", "unsupported", "version 0.9", with(10, 9)),
        ("header-reserved", "corrupt", "reserved bytes of the header are set", with(12, 1)),
        ("footer-cut", "truncated", "the last byte is missing", good[..end - 1].to_vec()),
        ("footer-bytes-after", "truncated", "a byte follows the footer", longer),
        ("footer-checksum", "corrupt", "the footer's checksum", with(end - FOOTER_LEN + 16, 0)),
        ("manifest-hash", "corrupt", "a byte of the manifest", with(end - FOOTER_LEN - 3, b'x')),
        ("table-hash", "corrupt", "a byte of the tensor table", with(0x38 + 16, 1)),
        ("block-checksum", "corrupt", "a byte of a block", with(0x20, 0x11)),
    ]
}

fn all() -> Vec<(Case, Vec<u8>)> {
    let case = |name: &str, error: &str, why: &str| Case {
        file: format!("{name}.s4w"),
        error: error.into(),
        why: why.into(),
    };
    let mut out = vec![];
    for (name, error, why, file) in damaged() {
        out.push((case(name, error, why), file));
    }
    let cases =
        [(plain_file(), PLAIN), (coded_file(), CODED), (pair_file(), PAIR), (alike_file(), ALIKE)];
    for (good, cases) in cases {
        for (name, error, why, change) in cases {
            let mut parts = Parts::new(&good);
            change(&mut parts);
            out.push((case(name, error, why), parts.build()));
        }
    }
    out
}

/// The kind of error that reading a whole file ends with.
fn verdict(file: Vec<u8>) -> String {
    let reader = match common::open(file) {
        Ok(reader) => reader,
        Err(e) => return kind(&e),
    };
    match reader.verify() {
        Ok(_) => "read".into(),
        Err(e) => kind(&e),
    }
}

fn kind(error: &Error) -> String {
    let Error::Format { source, .. } = error else { return error.to_string() };
    let kind = match source {
        FormatError::Corrupt { .. } => "corrupt",
        FormatError::Truncated { .. } => "truncated",
        FormatError::Unsupported { .. } => "unsupported",
        FormatError::Limit { .. } => "limit",
    };
    kind.into()
}

#[test]
fn parts_put_together_again_are_a_good_file() {
    for good in [plain_file(), coded_file(), pair_file(), alike_file()] {
        let again = Parts::new(&good).build();
        assert!(again == good);
        assert_eq!(verdict(again), "read");
    }
}

#[test]
fn every_broken_rule_is_seen() {
    let mut wrong = vec![];
    for (case, file) in all() {
        let found = verdict(file.clone());
        if found != case.error {
            let message = common::open(file).err().map(|e| e.to_string());
            wrong.push(format!("{}: {found}, not {}: {message:?}", case.file, case.error));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    if let Some(folder) = kept().map(|f| f.join("refuse")) {
        std::fs::create_dir_all(&folder).unwrap();
        let cases: Vec<_> = all().into_iter().map(|(case, _)| case).collect();
        let lines: Vec<_> = cases.iter().map(|c| serde_json::to_string(c).unwrap()).collect();
        std::fs::write(folder.join("refuse.json"), format!("[\n{}\n]\n", lines.join(",\n")))
            .unwrap();
        for (case, file) in all() {
            std::fs::write(folder.join(case.file), file).unwrap();
        }
    }
}

#[test]
fn every_file_of_the_list_is_refused_as_it_says() {
    let folder = kept().unwrap_or_else(|| repository("testdata")).join("refuse");
    let Ok(list) = std::fs::read_to_string(folder.join("refuse.json")) else {
        assert!(kept().is_some(), "testdata/refuse/refuse.json is missing");
        return;
    };
    let list: Vec<Case> = serde_json::from_str(&list).unwrap();
    let made: Vec<Case> = all().into_iter().map(|(case, _)| case).collect();
    assert_eq!(list, made);
    for case in list {
        let file = std::fs::read(folder.join(&case.file)).unwrap();
        assert_eq!(verdict(file), case.error, "{}", case.file);
    }
}
