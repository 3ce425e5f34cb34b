//! Checkpoints that are deltas of the one before.

mod common;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use common::{Memory, Owned, mixed, save};
use s4weights::format::Digest;
use s4weights::{
    Contents, DType, Error, MemoryOptions, MemoryParent, Parent, ParentProblem, ParentRange,
    ParentResolver, ParentTensor, Preset, ReadOptions, Reader, Result, Simd, Slice, Source, Target,
    TensorCodec, WriteOptions, Writer, Written, adversarial,
};

/// Files by the hash of their manifest.
type Files = Arc<Mutex<HashMap<Digest, Vec<u8>>>>;

fn resolver(files: &Files) -> ParentResolver {
    let files = Arc::clone(files);
    Arc::new(move |digest| {
        let found = files.lock().expect("in a test").get(digest).cloned();
        let found = found.ok_or(Error::NotFound { target: digest.to_string() })?;
        open(&files, found, None).map(Arc::new)
    })
}

fn open(files: &Files, file: Vec<u8>, threads: Option<usize>) -> Result<Reader> {
    let options = ReadOptions { threads, parents: Some(resolver(files)), ..Default::default() };
    Reader::open(Source::Bytes(file.into()), options)
}

fn alone(file: &[u8]) -> Reader {
    Reader::open(Source::Bytes(file.to_vec().into()), ReadOptions::default()).expect("in a test")
}

fn write(tensors: &[Owned], options: WriteOptions) -> Result<(Vec<u8>, Written)> {
    let memory = Memory::default();
    let mut writer = Writer::create(Target::Stream(Box::new(memory.clone())), options)?;
    writer.write(&tensors.iter().map(Owned::source).collect::<Vec<_>>())?;
    let written = writer.complete(Contents::default())?;
    let file = std::mem::take(&mut *memory.0.lock().expect("in a test"));
    Ok((file, written))
}

fn against(parent: &Arc<Reader>) -> WriteOptions {
    WriteOptions { parent: Some(Arc::clone(parent) as _), ..Default::default() }
}

fn check(reader: &Reader, tensors: &[Owned]) {
    for t in tensors {
        assert!(reader.read(&t.name).expect("in a test") == t.data, "{}", t.name);
    }
}

/// A step of training: low bits of some values change.
fn step(tensors: &mut [Owned], seed: u64) {
    for t in tensors {
        let width = t.dtype.value_width();
        for (i, value) in t.data.chunks_exact_mut(width).enumerate() {
            let x = (i as u64 + 1).wrapping_mul(seed.wrapping_mul(2) + 0x9e37_79b9_7f4a_7c15);
            if x >> 61 == 0 {
                value[0] ^= (x >> 32) as u8 & 7;
            }
        }
    }
}

fn pattern(dtype: DType, elements: usize, name: &str) -> Vec<u8> {
    adversarial(dtype, elements).find(|p| p.0 == name).expect("in a test").1
}

fn plan_of(reader: &Reader, name: &str) -> String {
    let inspection = reader.inspect(false).expect("in a test");
    inspection.tensors.into_iter().find(|t| t.name == name).expect("in a test").plan
}

#[test]
fn a_chain_of_sixteen_comes_back_at_every_step() {
    let files = Files::default();
    let mut steps = vec![mixed()];
    for i in 1..16 {
        let mut now = steps[i - 1].clone();
        if i != 9 {
            step(&mut now, i as u64);
        }
        let at = |name: &str| now.iter().position(|t| t.name == name).unwrap();
        match i {
            4 => {
                let (t, shape) = (at("v"), vec![401, 200]);
                now[t].shape = shape;
            }
            6 => {
                let t = at("ids");
                (now[t].dtype, now[t].shape) = (DType::Int32, vec![10_000]);
            }
            8 => {
                let data = pattern(DType::Float16, 9000, "weights-and-nans");
                now.insert(0, Owned::new("new", DType::Float16, &[9000], data));
            }
            12 => drop(now.remove(at("noise"))),
            _ => {}
        }
        steps.push(now);
    }
    let mut parent: Option<Arc<Reader>> = None;
    for (i, tensors) in steps.iter().enumerate() {
        let options = parent.as_ref().map_or_else(WriteOptions::default, against);
        let (file, written) = write(tensors, options).unwrap();
        assert_eq!(written.snapshot.depth(), i as u32 + 1);
        files.lock().unwrap().insert(written.snapshot.digest(), file.clone());
        for threads in [1, 3] {
            let reader = open(&files, file.clone(), Some(threads)).unwrap();
            check(&reader, tensors);
            let slice = reader.read_slice("w", &Slice(vec![17..290, 3..9])).unwrap();
            let w = &tensors.iter().find(|t| t.name == "w").unwrap().data;
            for (row, values) in (17..290).zip(slice.chunks(12)) {
                assert!(*values == w[(row * 500 + 3) * 2..(row * 500 + 9) * 2], "row {row}");
            }
        }
        let reader = Arc::new(open(&files, file.clone(), None).unwrap());
        assert_eq!(reader.verify().unwrap().tensors, tensors.len() as u64);
        if i > 0 {
            assert!(plan_of(&reader, "w").starts_with("parent xor"));
            assert_eq!(plan_of(&reader, "v").starts_with("parent"), i != 4, "step {i}");
            assert_eq!(plan_of(&reader, "ids").starts_with("parent"), i != 6, "step {i}");
            assert!(!plan_of(&reader, "ln.weight").contains("parent"));
            assert!(file.len() < save(tensors, WriteOptions::default()).len());
        }
        if i == 8 {
            assert!(plan_of(&reader, "new").starts_with("none"));
        }
        parent = Some(reader);
    }
    let e = write(&steps[15], against(&parent.clone().unwrap())).err().unwrap();
    let deep = ParentProblem::TooDeep { depth: 16, max: 16 };
    assert!(matches!(&e, Error::Parent { problem, .. } if problem.to_string() == deep.to_string()));
    let longer = WriteOptions { max_chain: Some(64), ..against(&parent.unwrap()) };
    assert_eq!(write(&steps[15], longer).unwrap().1.snapshot.depth(), 17);
}

#[test]
fn every_dtype_and_pattern_is_a_difference_from_every_other() {
    for &dtype in DType::ALL {
        for n in [4096, 5003] {
            let patterns: Vec<_> = adversarial(dtype, n).collect();
            let count = patterns.len();
            let tensors = |shift: usize| -> Vec<Owned> {
                (0..count)
                    .map(|i| {
                        let data = patterns[(i + shift) % count].1.clone();
                        Owned::new(format!("t{i:02}"), dtype, &[n as u64], data)
                    })
                    .collect()
            };
            let (file, _) = write(&tensors(0), WriteOptions::default()).unwrap();
            let parent = Arc::new(alone(&file));
            for shift in [0, 1, 5] {
                let now = tensors(shift);
                let (file, _) = write(&now, against(&parent)).unwrap();
                let reader = alone(&file);
                let direct = alone(&save(&now, WriteOptions::default()));
                if reader.parent_digest().is_some() {
                    reader.set_parent(Arc::clone(&parent)).unwrap();
                }
                check(&reader, &now);
                let (a, b) = (reader.inspect(false).unwrap(), direct.inspect(false).unwrap());
                for (a, b) in a.tensors.iter().zip(&b.tensors) {
                    assert!(a.stored <= b.stored, "{dtype} {}: {a:?} {b:?}", patterns[0].0);
                }
            }
        }
    }
}

#[test]
fn unchanged_tensors_cost_almost_nothing() {
    let n = 1 << 20;
    let data = pattern(DType::Float32, n, "like-weights");
    let tensors = vec![Owned::new("w", DType::Float32, &[n as u64], data)];
    let (file, _) = write(&tensors, WriteOptions::default()).unwrap();
    let parent = Arc::new(alone(&file));
    let (same, _) = write(&tensors, against(&parent)).unwrap();
    // 16 chunks, each with a header, constants and a record.
    assert!(same.len() < 2048 + 16 * 100, "{}", same.len());
    let reader = alone(&same);
    reader.set_parent(Arc::clone(&parent)).unwrap();
    check(&reader, &tensors);
    // Changes where the planner does not look are still coded.
    let mut some = tensors;
    for i in 0..300 {
        some[0].data[(700_000 + 3 * i) * 4] ^= 5;
    }
    let (file, _) = write(&some, against(&parent)).unwrap();
    assert!(file.len() < 10_000, "{}", file.len());
    let reader = alone(&file);
    reader.set_parent(parent).unwrap();
    check(&reader, &some);
}

#[test]
fn the_same_bytes_whatever_threads_instructions_and_place_of_the_parent() {
    let before = mixed();
    let (file, written) = write(&before, WriteOptions::default()).unwrap();
    let parent = Arc::new(alone(&file));
    let snapshot = Arc::new(written.snapshot);
    let read = parent.snapshot().unwrap();
    assert_eq!((read.digest(), read.depth()), (snapshot.digest(), 1));
    let codec = Arc::new(TensorCodec::new(MemoryOptions::default()).unwrap());
    let memory = |kept: bool, rest: bool, own: bool| -> Arc<dyn Parent> {
        let mut p = MemoryParent::new(Arc::clone(&snapshot), if kept { 1 << 20 } else { 0 });
        for (i, t) in before.iter().enumerate() {
            if rest && i == 0 {
                continue;
            } else if kept {
                let large = t.data.len() / t.dtype.value_width() >= 4096;
                assert_eq!(p.keep(&codec, &t.name, &t.data).unwrap(), large, "{}", t.name);
            } else if own {
                p.own(&t.name, t.data.clone().into()).unwrap();
            } else {
                p.hold(&t.name, t.data.clone().into()).unwrap();
            }
        }
        assert_eq!(p.used() > 0, kept);
        let rested = if rest { p.with_rest(Arc::clone(&parent) as _).unwrap() } else { p };
        Arc::new(rested)
    };
    let mut now = before.clone();
    step(&mut now, 3);
    let first = write(&now, against(&parent)).unwrap().0;
    let parents: [Arc<dyn Parent>; 6] = [
        Arc::clone(&parent) as _,
        memory(false, false, false),
        memory(false, false, true),
        memory(false, true, true),
        memory(true, false, false),
        memory(true, true, false),
    ];
    for (i, parent) in parents.iter().enumerate() {
        for simd in Simd::available() {
            for threads in [1, 2, 5] {
                let options = WriteOptions {
                    parent: Some(Arc::clone(parent)),
                    threads: Some(threads),
                    simd: Some(simd),
                    ..Default::default()
                };
                let file = write(&now, options).unwrap().0;
                assert!(file == first, "parent {i}, {simd}, {threads} threads");
            }
        }
    }
}

#[test]
fn values_that_changed_in_memory_are_an_error_and_no_difference() {
    let before = mixed();
    let (_, written) = write(&before, WriteOptions::default()).unwrap();
    let snapshot = Arc::new(written.snapshot);
    let mut now = before.clone();
    step(&mut now, 3);
    let mut data = before[0].data.clone();
    data[290_000] ^= 1;
    for own in [false, true] {
        let mut p = MemoryParent::new(Arc::clone(&snapshot), 0);
        let add = if own { MemoryParent::own } else { MemoryParent::hold };
        add(&mut p, "w", data.clone().into()).unwrap();
        let options = WriteOptions { parent: Some(Arc::new(p)), ..Default::default() };
        let e = write(&now, options).err().unwrap();
        assert!(
            matches!(&e, Error::Parent { tensor: Some(t), parent, problem: ParentProblem::Changed { chunk: 1 }, .. }
                if t == "w" && *parent == snapshot.digest()),
            "{e}"
        );
    }
    let mut p = MemoryParent::new(Arc::clone(&snapshot), 0);
    assert!(matches!(p.own("w", data[2..].to_vec().into()), Err(Error::Argument(_))));
    // Values kept compressed are compared with the snapshot immediately.
    let codec = Arc::new(TensorCodec::new(MemoryOptions::default()).unwrap());
    let mut p = MemoryParent::new(Arc::clone(&snapshot), 1 << 20);
    assert!(matches!(p.keep(&codec, "w", &data), Err(Error::Parent { .. })));
    assert!(matches!(p.keep(&codec, "w", &data[2..]), Err(Error::Argument(_))));
    assert!(matches!(p.hold("w", data[2..].to_vec().into()), Err(Error::Argument(_))));
    assert!(!p.keep(&codec, "no such tensor", &[]).unwrap());
    // The budget is never exceeded.
    let mut p = MemoryParent::new(snapshot, 1000);
    assert!(!p.keep(&codec, "w", &before[0].data).unwrap());
    assert_eq!(p.used(), 0);
}

#[test]
fn a_parent_that_is_missing_or_wrong_is_named_and_the_rest_can_be_read() {
    let before = mixed();
    let (base, _) = write(&before, WriteOptions::default()).unwrap();
    let parent = Arc::new(alone(&base));
    let mut now = before.clone();
    step(&mut now, 3);
    // A tensor that is no copy of another one, which would need the other's parent.
    let mut new = before[2].data.clone();
    new.rotate_left(4 * 777);
    now.push(Owned::new("new", DType::Float32, &[80_200], new));
    let (file, _) = write(&now, against(&parent)).unwrap();
    let problem = |reader: &Reader| match reader.read("w").err().unwrap() {
        Error::Parent { tensor: Some(t), parent: p, problem, .. } => {
            assert_eq!((t.as_str(), p), ("w", parent.digest()));
            problem
        }
        other => panic!("{other}"),
    };
    let reader = alone(&file);
    assert!(matches!(problem(&reader), ParentProblem::Missing));
    assert!(matches!(reader.verify(), Err(Error::Parent { .. })));
    for name in ["new", "ln.weight", "step", "none", "ln.bias"] {
        let t = now.iter().find(|t| t.name == name).unwrap();
        assert!(reader.read(name).unwrap() == t.data, "{name}");
    }
    let other = Arc::new(alone(&save(&now, WriteOptions::default())));
    let e = reader.set_parent(Arc::clone(&other)).unwrap_err();
    assert!(e.to_string().contains(&other.digest().to_string()), "{e}");
    assert!(e.to_string().contains(&parent.digest().to_string()), "{e}");
    let lying = Arc::clone(&other);
    let with = |parents: ParentResolver| {
        let options = ReadOptions { parents: Some(parents), ..Default::default() };
        Reader::open(Source::Bytes(file.clone().into()), options).unwrap()
    };
    let found = other.digest();
    let reader = with(Arc::new(move |_| Ok(Arc::clone(&lying))));
    assert!(matches!(problem(&reader), ParentProblem::OtherHash(d) if d == found));
    let files = Files::default();
    let reader = with(resolver(&files));
    assert!(matches!(problem(&reader), ParentProblem::Unreadable(_)));
    assert!(matches!(other.set_parent(parent), Err(Error::Argument(_))));
}

/// The file with a changed manifest, and hashes that match it.
fn forge(file: &[u8], from: &str, to: &str) -> Vec<u8> {
    use s4weights::format::file::{FOOTER_LEN, Footer};
    let footer = Footer::parse(file, file.len() as u64).expect("in a test");
    let json = &file[footer.offset as usize..file.len() - FOOTER_LEN];
    let text = std::str::from_utf8(json).expect("in a test");
    assert!(text.contains(from), "{text}");
    let text = text.replacen(from, to, 1);
    let mut out = file[..footer.offset as usize].to_vec();
    out.extend(text.as_bytes());
    let digest = Digest::of(text.as_bytes());
    out.extend(Footer { len: text.len() as u64, digest, ..footer }.to_bytes());
    out
}

#[test]
fn forged_plans_are_refused() {
    let mut before = vec![
        Owned::new("w", DType::Float32, &[5000], pattern(DType::Float32, 5000, "like-weights")),
        Owned::new("i", DType::Int32, &[5000], pattern(DType::Int32, 5000, "counting")),
        Owned::new("s", DType::Float32, &[2], vec![0; 8]),
    ];
    let (base, _) = write(&before, WriteOptions::default()).unwrap();
    let parent = Arc::new(alone(&base));
    step(&mut before[..1], 3);
    before[1].data.reverse();
    let (file, _) = write(&before, against(&parent)).unwrap();
    let hash = parent.digest().to_string();
    let input = |t: u32| format!("{{\"manifest\":\"{hash}\",\"tensor\":{t}}}");
    let read = |to: &str| {
        let reader = Reader::open(
            Source::Bytes(forge(&file, &input(0), to).into()),
            ReadOptions::default(),
        )?;
        reader.set_parent(Arc::clone(&parent))?;
        reader.read("w")
    };
    assert!(read(&input(0)).unwrap() == before[0].data);
    let problem = |to: &str| match read(to).unwrap_err() {
        Error::Parent { problem, tensor, .. } => {
            assert_eq!(tensor.as_deref(), Some("w"));
            problem
        }
        other => panic!("{other}"),
    };
    for number in [3, 4, 999, u32::MAX] {
        // 3 is the pack.
        assert!(matches!(problem(&input(number)), ParentProblem::NoTensor(n) if n == number));
    }
    for number in [1, 2] {
        assert!(matches!(problem(&input(number)), ParentProblem::OtherShape { .. }));
    }
    let two = format!("{},{}", input(0), input(0));
    let own = "{\"tensor\":0}".to_owned();
    let region = input(0).replace('}', ",\"region\":[[0,1]]}");
    let other = input(0).replace(&hash, &Digest::of(b"other").to_string());
    for to in [two, own, region, other, String::new()] {
        assert!(matches!(read(&to), Err(Error::Format { .. })), "{to}");
    }
    // A depth that does not match the parent's.
    let at = format!("\"parent\":{{\"manifest\":\"{hash}\",\"depth\":");
    for depth in [2, 63] {
        let forged = forge(&file, &format!("{at}1"), &format!("{at}{depth}"));
        let e = alone(&forged).set_parent(Arc::clone(&parent)).unwrap_err();
        assert!(matches!(e, Error::Parent { problem: ParentProblem::Depth { .. }, .. }), "{e}");
    }
    for depth in ["0", "64", "4294967295", "-1"] {
        let forged = forge(&file, &format!("{at}1"), &format!("{at}{depth}"));
        assert!(Reader::open(Source::Bytes(forged.into()), ReadOptions::default()).is_err());
    }
}

#[test]
fn every_flip_in_a_difference_or_its_parent_is_an_error_or_the_exact_data() {
    let before = vec![Owned::new(
        "w",
        DType::BFloat16,
        &[4500],
        pattern(DType::BFloat16, 4500, "like-weights"),
    )];
    let mut now = before.clone();
    step(&mut now, 3);
    let (base, _) = write(&before, WriteOptions::default()).unwrap();
    let (file, _) = write(&now, against(&Arc::new(alone(&base)))).unwrap();
    let read = |base: Vec<u8>, file: Vec<u8>| -> Result<Vec<u8>> {
        let options = ReadOptions { threads: Some(1), ..ReadOptions::default() };
        let reader = Reader::open(Source::Bytes(file.into()), options.clone())?;
        reader.set_parent(Arc::new(Reader::open(Source::Bytes(base.into()), options)?))?;
        reader.read("w")
    };
    assert!(read(base.clone(), file.clone()).unwrap() == now[0].data);
    let mut unseen = 0;
    for at in 0..base.len() + file.len() {
        let (mut base, mut file) = (base.clone(), file.clone());
        match at.checked_sub(base.len()) {
            Some(at) => file[at] ^= 1 << (at % 8),
            None => base[at] ^= 1 << (at % 8),
        }
        match read(base, file) {
            Ok(data) => {
                unseen += 1;
                assert!(data == now[0].data, "byte {at}");
            }
            Err(Error::Format { .. } | Error::Parent { .. }) => {}
            Err(e) => panic!("byte {at}: {e}"),
        }
    }
    assert!(unseen < (base.len() + file.len()) / 40, "{unseen} flips went unseen");
}

/// Forwards to a reader, and records the most bytes that one call asked for.
struct Watched(Arc<Reader>, Mutex<usize>);

impl Parent for Watched {
    fn digest(&self) -> Digest {
        self.0.digest()
    }
    fn depth(&self) -> u32 {
        Parent::depth(&*self.0)
    }
    fn find(&self, name: &str) -> Option<ParentTensor<'_>> {
        Parent::find(&*self.0, name)
    }
    fn read(&self, ranges: &mut [ParentRange<'_>]) -> Result<()> {
        let bytes: usize = ranges.iter().map(|r| r.to.len()).sum();
        let mut most = self.1.lock().expect("in a test");
        *most = bytes.max(*most);
        drop(most);
        Parent::read(&*self.0, ranges)
    }
}

#[test]
fn a_parent_is_asked_for_a_chunk_at_a_time() {
    let n = 3 << 20;
    let before = vec![Owned::new(
        "w",
        DType::Float32,
        &[n as u64],
        pattern(DType::Float32, n, "like-weights"),
    )];
    let mut now = before.clone();
    step(&mut now, 3);
    let (base, _) = write(&before, WriteOptions::default()).unwrap();
    let watched = Arc::new(Watched(Arc::new(alone(&base)), Mutex::default()));
    let options =
        WriteOptions { parent: Some(Arc::clone(&watched) as _), ..WriteOptions::default() };
    let (file, written) = write(&now, options).unwrap();
    assert!(written.report.streams.keys().any(|k| k.starts_with("xor/")));
    assert_eq!(*watched.1.lock().unwrap(), 256 << 10);
    let reader = alone(&file);
    reader.set_parent(Arc::clone(&watched.0)).unwrap();
    check(&reader, &now);
}

/// The tensors of a file in `testdata`.
fn trained(name: &str) -> Vec<Owned> {
    let path = format!("{}/../../testdata/{name}.safetensors", env!("CARGO_MANIFEST_DIR"));
    let file = std::fs::read(path).expect("in a test");
    let tensors = safetensors::SafeTensors::deserialize(&file).expect("in a test");
    let mut out: Vec<_> = (tensors.tensors().into_iter())
        .map(|(name, t)| {
            let dtype = match t.dtype() {
                safetensors::Dtype::BF16 => DType::BFloat16,
                _ => DType::Float32,
            };
            let shape: Vec<u64> = t.shape().iter().map(|&d| d as u64).collect();
            Owned::new(name, dtype, &shape, t.data().to_vec())
        })
        .collect();
    out.sort_by(|a, b| a.name.cmp(&b.name));
    out
}

#[test]
fn a_step_of_training_stays_as_small_as_it_was() {
    // Ratios measured when this test was written.
    for (name, known) in [("gpt34m_bf16", 2.363), ("gpt98m_fp32", 1.384)] {
        let before = trained(&format!("{name}_s0"));
        let now = trained(&format!("{name}_s1"));
        let fast = WriteOptions { preset: Preset::Fast, ..WriteOptions::default() };
        let (base, _) = write(&before, fast.clone()).unwrap();
        let parent = Arc::new(alone(&base));
        let options = WriteOptions { parent: Some(Arc::clone(&parent) as _), ..fast.clone() };
        let (file, written) = write(&now, options).unwrap();
        let ratio = written.report.bytes_in as f64 / file.len() as f64;
        assert!(ratio * 1.002 >= known, "{name}: {ratio:.4}");
        let reader = alone(&file);
        reader.set_parent(parent).unwrap();
        check(&reader, &now);
        let direct = alone(&write(&now, fast).unwrap().0);
        let sizes = |r: &Reader| r.inspect(false).unwrap().tensors;
        for (a, b) in sizes(&reader).iter().zip(&sizes(&direct)) {
            assert!(a.stored <= b.stored, "{name} {}", a.name);
        }
    }
}

#[test]
fn ranges_that_are_not_there_are_refused() {
    let (base, written) = write(&mixed(), WriteOptions::default()).unwrap();
    let reader = alone(&base);
    let snapshot = Arc::new(written.snapshot);
    let mut memory = MemoryParent::new(Arc::clone(&snapshot), 0);
    memory.hold("w", mixed()[0].data.clone().into()).unwrap();
    let mut own = MemoryParent::new(Arc::clone(&snapshot), 0);
    own.own("w", mixed()[0].data.clone().into()).unwrap();
    let parents: [&dyn Parent; 3] = [&reader, &memory, &own];
    for parent in parents {
        let number = parent.find("w").unwrap().number;
        assert!(parent.find("no such tensor").is_none());
        let mut to = vec![0; 1000];
        for (tensor, first) in [(number, 299_001), (number, u64::MAX), (777, 0)] {
            let range = ParentRange { tensor, first, to: &mut to };
            assert!(parent.read(&mut [range]).is_err(), "{tensor} {first}");
            // The range does not exist, or is not in memory.
            assert!(!matches!(parent.in_memory(tensor, first, 1000), Ok(Some(_))));
        }
        let range = ParentRange { tensor: number, first: 299_000, to: &mut to };
        parent.read(&mut [range]).unwrap();
        assert!(to == mixed()[0].data[299_000..]);
    }
    let number = own.find("w").unwrap().number;
    assert!(own.in_memory(number, 299_000, 1000).unwrap().unwrap() == &mixed()[0].data[299_000..]);
    // Values that their owner may change are only handed out as copies.
    assert!(memory.in_memory(number, 299_000, 1000).unwrap().is_none());
}

#[test]
fn deltas_are_applied_where_their_parents_values_are() {
    let mut steps = vec![mixed()];
    for i in 1..5 {
        let mut now = steps[i - 1].clone();
        step(&mut now, i as u64);
        steps.push(now);
    }
    let mut parent: Option<Arc<Reader>> = None;
    let mut held = steps[0].clone();
    for (i, tensors) in steps.iter().enumerate() {
        let options = parent.as_ref().map_or_else(WriteOptions::default, against);
        let (file, _) = write(tensors, options).unwrap();
        for threads in [Some(1), None] {
            // No ancestor can be opened.
            let options = ReadOptions { threads, ..ReadOptions::default() };
            let reader = Reader::open(Source::Bytes(file.clone().into()), options).unwrap();
            let mut values = held.clone();
            let mut requests: Vec<_> = (values.iter_mut())
                .map(|t| (reader.find(&t.name).unwrap(), t.data.as_mut_slice()))
                .collect();
            reader.apply_into(&mut requests).unwrap();
            for (t, now) in tensors.iter().zip(&values) {
                assert!(t.data == now.data, "{} of step {i}", t.name);
            }
            if i > 0 {
                // Applied once more, to values that are no longer the parent's.
                let mut requests: Vec<_> = (values.iter_mut())
                    .map(|t| (reader.find(&t.name).unwrap(), t.data.as_mut_slice()))
                    .collect();
                let e = reader.apply_into(&mut requests).unwrap_err();
                assert!(matches!(&e, Error::Format { .. }), "{e}");
            }
            let mut whole = vec![0; tensors[0].data.len()];
            let number = reader.find(&tensors[0].name).unwrap();
            let mut other = whole.clone();
            let mut twice = [(number, whole.as_mut_slice()), (number, other.as_mut_slice())];
            assert!(matches!(reader.apply_into(&mut twice), Err(Error::Argument(_))));
        }
        held.clone_from(tensors);
        parent = Some(Arc::new(match parent {
            None => alone(&file),
            Some(above) => {
                let reader = alone(&file);
                reader.set_parent(above).unwrap();
                reader
            }
        }));
    }
}
