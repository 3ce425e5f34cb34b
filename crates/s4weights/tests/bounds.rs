//! Work and memory of reading are bounded by the sizes of the file and of the requested tensors,
//! whatever the file says.

#![expect(clippy::unwrap_used, reason = "tests, and what they share")]

#[path = "common/craft.rs"]
mod craft;

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use craft::{BYTE, Constant, Craft};
use s4_engine::{EncodeJob, ParentSample, PlanJob, Scratch, TensorView, parent_probes};
use s4weights::format::index::{self, Block, Tensor, TensorKind};
use s4weights::format::manifest::Parent;
use s4weights::format::{Digest, Error as FormatError, crc32c};
use s4weights::{
    CpuEngine, DType, Error, ParentResolver, Preset, ReadOptions, Reader, Result, Simd, Slice,
    Source, adversarial,
};

/// Counts the bytes that are allocated, and records the peak.
struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

fn grew(by: usize) {
    let now = NOW.fetch_add(by, Ordering::Relaxed) + by;
    MOST.fetch_max(now, Ordering::Relaxed);
}

// SAFETY: forwards to the system's allocator, and only counts besides.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grew(layout.size());
        // SAFETY: the caller keeps the promises of `GlobalAlloc`.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        grew(layout.size());
        // SAFETY: the caller keeps the promises of `GlobalAlloc`.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the promises of `GlobalAlloc`.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Tests take turns, because allocations are counted for the whole process.
static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(|e| e.into_inner())
}

/// Runs `work` on a file. It may allocate at most 64 MiB plus four times the size of the file and
/// of the tensors that it asks for.
fn bounded<T>(file: &[u8], asked: usize, work: impl FnOnce(Vec<u8>) -> T) -> T {
    let before = NOW.load(Ordering::Relaxed);
    MOST.store(before, Ordering::Relaxed);
    let out = work(file.to_vec());
    let most = MOST.load(Ordering::Relaxed) - before;
    let allowed = (64 << 20) + 4 * file.len() + asked;
    assert!(most <= allowed, "{most} bytes for a file of {} bytes", file.len());
    println!("{most} of {allowed} bytes for a file of {} bytes", file.len());
    out
}

fn open(file: Vec<u8>) -> Result<Reader> {
    let options = ReadOptions { threads: Some(2), ..ReadOptions::default() };
    Reader::open(Source::Bytes(file.into()), options)
}

/// The message of the error that must say that a file is corrupt.
fn refused<T>(result: Result<T>) -> String {
    match result {
        Err(Error::Format { source: e @ FormatError::Corrupt { .. }, .. }) => e.to_string(),
        Err(e) => panic!("{e}"),
        Ok(_) => panic!("it was read"),
    }
}

#[test]
fn chunks_in_the_same_bytes_are_refused() {
    let _turn = turn();
    // A small file that would expand to 96 MiB.
    let mut one = Constant::new("x", DType::Float64, 24 << 19, 18);
    one.overlapping = true;
    let (file, _) = Craft::new().constants(&[one]).finish();
    assert!(file.len() < 2500, "{}", file.len());
    let say = |e: String| assert!(e.contains("tensor `x`, chunk") && e.contains("another"), "{e}");
    bounded(&file, 0, |file| {
        let reader = open(file).unwrap();
        say(refused(reader.verify()));
        say(refused(reader.inspect(true)));
        let first = 0..1;
        say(refused(reader.read_slice("x", &Slice(vec![first]))));
    });
}

#[test]
fn chunks_of_two_tensors_in_the_same_bytes_are_refused() {
    let _turn = turn();
    let list = [("a", 70_000), ("b", 70_000)];
    let list = list.map(|(name, n)| Constant::new(name, DType::Int8, n, 16));
    let mut craft = Craft::new().constants(&list);
    // The second tensor's table becomes that of the first.
    let block = |t: &Tensor| match t.kind {
        TensorKind::Chunks { block, .. } => block,
        TensorKind::Packed { .. } => panic!("none is packed"),
    };
    let (a, b) = (block(&craft.tensors[0]), block(&craft.tensors[1]));
    let table = a.offset as usize..a.offset as usize + a.len as usize;
    craft.bytes.copy_within(table, b.offset as usize);
    let TensorKind::Chunks { block, .. } = &mut craft.tensors[1].kind else { panic!() };
    block.crc = a.crc;
    let (file, _) = craft.finish();
    for order in [["a", "b"], ["b", "a"]] {
        let reader = open(file.clone()).unwrap();
        assert!(reader.read(order[0]).unwrap().iter().all(|b| *b == BYTE));
        let e = refused(reader.read(order[1]));
        assert!(e.contains(&format!("tensor `{}`, chunk 0", order[1])), "{e}");
        refused(reader.verify());
    }
    refused(open(file).unwrap().snapshot());
}

/// A tensor table of many records, each changed by `change`.
fn table_of(count: u32, change: impl Fn(u32, &mut [u8]), names: usize) -> Vec<u8> {
    let tensor = |i: u32| Tensor {
        name: format!("{i:07}"),
        dtype: DType::UInt8,
        shape: vec![1 << 16],
        plan: 0,
        kind: TensorKind::Chunks {
            block: Block { offset: 16 + 24 * u64::from(i), len: 24, crc: 0 },
            chunk_log2: 16,
            pack: false,
        },
    };
    let mut bytes = index::write_table(&(0..count).map(tensor).collect::<Vec<_>>()).unwrap();
    for i in 0..count {
        let at = index::TABLE_HEADER_LEN + i as usize * index::RECORD_LEN;
        change(i, &mut bytes[at..at + index::RECORD_LEN]);
    }
    let pool = bytes.len() - count as usize * 7;
    for i in 0..names {
        bytes[pool + i] = b'a' + (i * i % 23) as u8;
    }
    bytes
}

fn with_table(table: Vec<u8>) -> Vec<u8> {
    let count = u64::from(u32::from_le_bytes(table[..4].try_into().unwrap()));
    let mut craft = Craft::new().constants(&[Constant::new("x", DType::UInt8, 1 << 16, 16)]);
    // Room for the blocks.
    craft.bytes.resize(craft.bytes.len().max(16 + 24 * count as usize), 0);
    craft.finish_with(|bytes| *bytes = table, |json| json).0
}

#[test]
fn names_shapes_and_blocks_in_the_same_bytes_are_refused() {
    let _turn = turn();
    // 1 MB of names of 4 KB each.
    let names = |i: u32, record: &mut [u8]| {
        record[0..4].copy_from_slice(&i.to_le_bytes());
        record[4..6].copy_from_slice(&4096u16.to_le_bytes());
    };
    let count = 16_000;
    let shapes = |i: u32, record: &mut [u8]| {
        record[7] = 64;
        record[8..12].copy_from_slice(&i.min(count - 65).to_le_bytes());
    };
    let blocks = |_: u32, record: &mut [u8]| {
        record[16..24].copy_from_slice(&16u64.to_le_bytes());
        record[24..28].copy_from_slice(&(300_000u32).to_le_bytes());
    };
    type Change<'a> = &'a dyn Fn(u32, &mut [u8]);
    let changes: [(&str, Change<'_>); 3] =
        [("names", &names), ("shapes", &shapes), ("blocks", &blocks)];
    for (what, change) in changes {
        let pool = if what == "names" { count as usize * 7 } else { 0 };
        let file = with_table(table_of(count, change, pool));
        let e = refused(bounded(&file, 0, open));
        assert!(e.contains(&format!("{what} of two tensors overlap")), "{e}");
    }
    // The unchanged file opens, within the same bounds.
    let file = with_table(table_of(count, |_, _| (), 0));
    bounded(&file, 0, |file| assert_eq!(open(file).unwrap().tensors().len(), count as usize));
}

#[test]
fn small_text_does_not_become_large_maps() {
    let _turn = turn();
    let craft = || Craft::new().constants(&[Constant::new("x", DType::UInt8, 100, 16)]);
    let groups = r#"{"a":1},"#.repeat(3_000_000);
    let entries: String = (0..2_000_000).map(|i| format!("\"{i}\":\"\",")).collect();
    for (what, text) in [
        ("groups", format!(r#""roles":{{"tensors":[],"groups":[{groups}{{}}]}},"form""#)),
        ("metadata", format!(r#""metadata":{{{entries}"":""}},"form""#)),
    ] {
        let (file, _) = craft().finish_with(|_| (), |json| json.replacen("\"form\"", &text, 1));
        let e = refused(bounded(&file, 0, open));
        assert!(e.contains("too many entries"), "{what}: {e}");
    }
}

/// Checkpoints by the hash of their manifest.
type Files = Arc<Mutex<HashMap<Digest, Vec<u8>>>>;

fn resolver(files: &Files) -> ParentResolver {
    let files = Arc::clone(files);
    Arc::new(move |digest| {
        let file = files.lock().unwrap().get(digest).cloned();
        let file = file.ok_or(Error::NotFound { target: digest.to_string() })?;
        open_chain(&files, file).map(Arc::new)
    })
}

fn open_chain(files: &Files, file: Vec<u8>) -> Result<Reader> {
    let parents = Some(resolver(files));
    let options = ReadOptions { threads: Some(2), parents, ..ReadOptions::default() };
    Reader::open(Source::Bytes(file.into()), options)
}

/// A chain of checkpoints whose tensor has chunks of the given sizes, the base first; returns the last.
fn chain(files: &Files, values: u64, sizes: &[u8]) -> Vec<u8> {
    let mut parent: Option<Parent> = None;
    let mut last = vec![];
    for &log2 in sizes {
        let tensor = Constant { parent, ..Constant::new("x", DType::Float64, values, log2) };
        let (file, name) = Craft::new().constants(&[tensor]).finish();
        files.lock().unwrap().insert(name.manifest, file.clone());
        (parent, last) = (Some(name), file);
    }
    last
}

#[test]
fn a_chain_of_changing_chunk_sizes_is_restored_level_by_level() {
    let _turn = turn();
    let values = (5 << 17) + 77;
    let bytes = values as usize * 8;
    for sizes in [
        [16, 18].repeat(12),
        [18, 17, 16].repeat(8),
        [16, 17, 18].repeat(8),
        vec![18, 16],
        vec![16, 16, 18, 18],
    ] {
        let files = Files::default();
        let last = chain(&files, values, &sizes);
        let stored: usize = files.lock().unwrap().values().map(Vec::len).sum();
        let started = Instant::now();
        bounded(&vec![0; stored], 2 * bytes, |_| {
            let reader = open_chain(&files, last).unwrap();
            let all = reader.read("x").unwrap();
            assert!(all.len() == bytes && all.iter().all(|b| *b == BYTE));
            for slice in [0..1, 65_535..65_537, (1 << 18) - 1..(1 << 18) + 2, values - 1..values] {
                let part = reader.read_slice("x", &Slice(vec![slice])).unwrap();
                assert!(!part.is_empty() && part.iter().all(|b| *b == BYTE));
            }
            let checked = reader.verify().unwrap();
            assert_eq!(checked.chunks, values.div_ceil(1 << sizes[sizes.len() - 1]));
        });
        // This once took hours.
        assert!(started.elapsed() < Duration::from_secs(600), "{sizes:?}: {:?}", started.elapsed());
    }
}

#[test]
fn copies_of_tensors_with_larger_chunks_are_refused() {
    let _turn = turn();
    let of = |name, log2| Constant::new(name, DType::Float64, 1 << 18, log2);
    let copy = |name, log2, of_number| Constant { same: Some(of_number), ..of(name, log2) };
    let refused_in = |file: &[u8], files: &Files, name: &str| {
        let reader = open_chain(files, file.to_vec()).unwrap();
        for e in [refused(reader.read(name)), refused(reader.verify())] {
            assert!(e.contains("chunks are larger than those of its copy"), "{e}");
        }
    };
    let files = Files::default();
    // Each chunk of `b` would be decoded four times for `a`, and those of `c` as often for them.
    let list = [copy("a", 16, 1), copy("b", 18, 2), of("c", 16)];
    let (file, _) = Craft::new().constants(&list).finish();
    refused_in(&file, &files, "a");
    assert!(open(file).unwrap().read("b").unwrap().iter().all(|b| *b == BYTE));
    let list = [copy("a", 18, 1), copy("b", 17, 2), of("c", 16)];
    let (file, _) = Craft::new().constants(&list).finish();
    let reader = open(file).unwrap();
    assert!(reader.read("a").unwrap().iter().all(|b| *b == BYTE));
    reader.verify().unwrap();
    // The larger chunks are the parent's.
    let (base, parent) = Craft::new().constants(&[of("a", 18)]).finish();
    files.lock().unwrap().insert(parent.manifest, base);
    let delta = Constant { parent: Some(parent), ..of("a", 16) };
    let (file, _) = Craft::new().constants(&[delta, copy("b", 16, 0)]).finish();
    refused_in(&file, &files, "b");
    let reader = open_chain(&files, file).unwrap();
    assert!(reader.read("a").unwrap().iter().all(|b| *b == BYTE));
}

/// A chain of realistic values, some of which each step changes; returns the last file and its values.
fn line(files: &Files, values: usize, sizes: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let (engine, mut scratch) = (CpuEngine::new(Simd::detect()), Scratch::default());
    let dtype = DType::BFloat16;
    let mut data = adversarial(dtype, values).find(|p| p.0 == "like-weights").unwrap().1;
    let shape = [values as u64];
    let mut parent: Option<Parent> = None;
    let (mut last, mut before): (Vec<u8>, Vec<u8>) = Default::default();
    for (step, &log2) in sizes.iter().enumerate() {
        let view = TensorView { dtype, shape: &shape, data: &data };
        let probes = parent_probes(dtype, values as u64);
        let part = |r: std::ops::Range<u64>| &before[r.start as usize * 2..r.end as usize * 2];
        let mut plan = match parent {
            None => engine.plan(&PlanJob::new(Preset::Fast, &view), &mut scratch).unwrap(),
            Some(Parent { manifest, .. }) => {
                let sample: Vec<u8> = probes.into_iter().flat_map(part).copied().collect();
                let sample = ParentSample {
                    manifest,
                    tensor: 0,
                    values: &sample,
                    moments: &[],
                    expected: None,
                };
                engine
                    .plan(
                        &PlanJob { parent: Some(&sample), ..PlanJob::new(Preset::Fast, &view) },
                        &mut scratch,
                    )
                    .unwrap()
            }
        };
        assert_eq!(plan.plan.parent().is_some(), step > 0);
        plan.chunk_log2 = log2;
        let chunk = |(i, part): (usize, &[u8])| {
            let (mut frame, first) = (vec![], i * (2 << log2));
            let below = before.get(first..first + part.len());
            let e = engine.encode(
                &EncodeJob { view: &view, plan: &plan, chunk: i as u64, inputs: below.as_slice() },
                &mut scratch,
                &mut frame,
            );
            (e.unwrap(), frame)
        };
        let chunks = data.chunks(2 << log2).enumerate().map(chunk).collect();
        let (file, name) = Craft::new().coded("x", &view, &plan, parent, chunks).finish();
        files.lock().unwrap().insert(name.manifest, file.clone());
        (parent, last) = (Some(name), file);
        before = data.clone();
        if step + 1 < sizes.len() {
            let every = 40 + 14 * step;
            data.iter_mut().step_by(every).for_each(|b| *b = b.wrapping_add(1 + step as u8));
            // A stretch of noise, which is stored without the parent.
            let at = (100_000 * (1 + step)) % (data.len() - 300_000);
            let noise = |i: usize| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 37) as u8;
            (at..at + 300_000).for_each(|i| data[i] = noise(i + step));
        }
    }
    (last, data)
}

#[test]
fn values_of_chains_of_changing_chunk_sizes_come_back() {
    let _turn = turn();
    let values = (2 << 18) + 100_001;
    for sizes in [&[18, 16][..], &[16, 18], &[16, 17, 18, 16, 18], &[18, 17, 17, 16, 17], &[17, 17]]
    {
        let files = Files::default();
        let (last, data) = line(&files, values, sizes);
        let reader = open_chain(&files, last).unwrap();
        assert!(reader.read("x").unwrap() == data, "{sizes:?}");
        for slice in [0..1, 65_530..65_540, 131_000..270_000, 262_143..262_145, values - 9..values]
        {
            let (first, end) = (slice.start * 2, slice.end * 2);
            let range = slice.start as u64..slice.end as u64;
            let slice = Slice(vec![range]);
            assert!(reader.read_slice("x", &slice).unwrap() == data[first..end], "{slice:?}");
        }
        reader.verify().unwrap();
    }
}

#[test]
fn damage_in_a_chain_of_changing_chunk_sizes_is_found() {
    let _turn = turn();
    let files = Files::default();
    let last = chain(&files, 1 << 18, &[18, 16, 18]);
    let digests: Vec<_> = files.lock().unwrap().keys().copied().collect();
    for digest in digests {
        // The byte of the first chunk's constant.
        let damaged = Files::new(Mutex::new(files.lock().unwrap().clone()));
        damaged.lock().unwrap().get_mut(&digest).unwrap()[32] ^= 1;
        let last = if crc32c(&files.lock().unwrap()[&digest]) == crc32c(&last) {
            damaged.lock().unwrap()[&digest].clone()
        } else {
            last.clone()
        };
        let reader = open_chain(&damaged, last).unwrap();
        let e = refused(reader.read("x"));
        assert!(e.contains("tensor `x`, chunk 0"), "{e}");
        refused(reader.verify());
    }
}
