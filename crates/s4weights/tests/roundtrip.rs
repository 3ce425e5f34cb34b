//! What is written comes back, whole and in part, and always as the same bytes.

mod common;

use common::{Memory, Owned, mixed, open, save, save_to};
use proptest::prelude::*;
use s4weights::{
    ArrayView, Contents, DType, Error, MemoryOptions, Preset, ReadOptions, Reader, Simd, Slice,
    Source, Target, TensorCodec, TensorSource, TensorView, WriteOptions, Writer, adversarial,
};

#[test]
fn every_dtype_and_pattern_comes_back_through_a_file() {
    for &dtype in DType::ALL {
        // Small, packed tensors and tensors with chunks of their own.
        for n in [1, 3, 100, 5000] {
            let tensors: Vec<_> = adversarial(dtype, n)
                .map(|(name, data)| Owned::new(name, dtype, &[n as u64], data))
                .collect();
            let reader = open(save(&tensors, WriteOptions::default())).unwrap();
            for t in &tensors {
                assert!(reader.read(&t.name).unwrap() == t.data, "{dtype} {} {n}", t.name);
            }
        }
    }
}

#[test]
fn threads_and_instructions_do_not_change_a_byte() {
    let tensors = mixed();
    let options = |threads, simd| WriteOptions {
        threads: Some(threads),
        simd: Some(simd),
        ..WriteOptions::default()
    };
    let first = save(&tensors, options(1, Simd::Scalar));
    for simd in Simd::available() {
        for threads in [1, 2, 5] {
            assert!(save(&tensors, options(threads, simd)) == first, "{simd}, {threads} threads");
        }
    }
    // One call for all tensors or one for each: the same file.
    let memory = Memory::default();
    let target = Target::Stream(Box::new(memory.clone()));
    let mut writer = Writer::create(target, WriteOptions::default()).unwrap();
    for t in &tensors {
        let source = TensorSource::new(&t.name, t.dtype, &t.shape, &t.data);
        writer.write(&[source]).unwrap();
    }
    writer.finish(Contents::default()).unwrap();
    let reader = open(memory.0.lock().unwrap().clone()).unwrap();
    for t in &tensors {
        assert!(reader.read(&t.name).unwrap() == t.data);
    }
}

#[test]
fn many_tensors_are_read_into_buffers_at_once() {
    let tensors = mixed();
    let file = save(&tensors, WriteOptions::default());
    for threads in [1, 3] {
        let options = ReadOptions { threads: Some(threads), ..ReadOptions::default() };
        let reader = Reader::open(Source::Bytes(file.clone().into()), options).unwrap();
        let mut out: Vec<Vec<u8>> = tensors.iter().map(|t| vec![1; t.data.len()]).collect();
        let mut requests: Vec<(usize, &mut [u8])> =
            out.iter_mut().enumerate().map(|(i, o)| (i, o.as_mut_slice())).collect();
        reader.read_into(&mut requests).unwrap();
        for (o, t) in out.iter().zip(&tensors) {
            assert!(*o == t.data, "{}", t.name);
        }
        assert_eq!(reader.tensors().len(), tensors.len());
        assert_eq!(reader.verify().unwrap().tensors, tensors.len() as u64);
    }
}

#[test]
#[expect(clippy::single_range_in_vec_init, reason = "a slice of one dimension is one range")]
fn slices_are_the_same_as_of_the_whole() {
    let tensors = mixed();
    let reader = open(save(&tensors, WriteOptions::default())).unwrap();
    for (name, slice) in [
        ("w", vec![17..250, 0..500]),
        ("w", vec![262..263, 100..499]),
        ("v", vec![0..200, 400..401]),
        ("ln.weight", vec![3..70]),
        ("step", vec![]),
        ("none", vec![0..0, 2..5]),
    ] {
        let t = tensors.iter().find(|t| t.name == name).unwrap();
        let size = t.dtype.size();
        let mut want: Vec<u8> = vec![];
        match slice.as_slice() {
            [rows, cols] => {
                for r in rows.clone() {
                    for c in cols.clone() {
                        let at = (r * t.shape[1] + c) as usize * size;
                        want.extend(&t.data[at..at + size]);
                    }
                }
            }
            [all] => want.extend(&t.data[all.start as usize * size..all.end as usize * size]),
            _ => want.extend(&t.data),
        }
        assert!(reader.read_slice(name, &Slice(slice)).unwrap() == want, "{name}");
    }
    assert!(reader.read_slice("w", &Slice(vec![0..301, 0..1])).is_err());
}

#[test]
fn arrays_within_a_tensor_are_read_in_part() {
    let tensors = mixed();
    let reader = open(save(&tensors, WriteOptions::default())).unwrap();
    let number = reader.find("w").unwrap();
    let t = tensors.iter().find(|t| t.name == "w").unwrap();
    let item = t.dtype.size() as u64;
    // 40 rows of 70 elements from element 99 on; columns 5 to 9 of rows 2 to 37 are read.
    let view = ArrayView { offset: 99 * item, item, shape: &[40, 70] };
    let part = Slice(vec![2..37, 5..9]);
    let want: Vec<u8> = (2..37)
        .flat_map(|row| {
            let at = ((99 + row * 70 + 5) * item) as usize;
            &t.data[at..at + 4 * item as usize]
        })
        .copied()
        .collect();
    let mut got = vec![0; want.len()];
    reader.read_view(number, view, &part, &mut got).unwrap();
    assert!(got == want);

    let refused = |view, part: Slice, len: usize| {
        let mut to = vec![0; len];
        matches!(reader.read_view(number, view, &part, &mut to), Err(Error::Argument(_)))
    };
    assert!(refused(view, part.clone(), want.len() - 1));
    assert!(refused(view, Slice(vec![2..41, 5..9]), 39 * 4 * item as usize));
    let end = t.data.len() as u64;
    let beyond = ArrayView { offset: end - 8, item: 1, shape: &[9] };
    assert!(refused(beyond, Slice(std::iter::once(0..9).collect()), 9));
    let huge = ArrayView { offset: 8, item: u64::MAX, shape: &[1, u64::MAX] };
    assert!(refused(huge, Slice(vec![0..1, 0..1]), 8));
    assert!(refused(
        ArrayView { offset: u64::MAX, ..view },
        Slice(vec![0..1, 0..1]),
        item as usize
    ));
    assert!(reader.read_view(999, view, &part, &mut got).is_err());
}

#[test]
fn a_stored_tensor_costs_little_more_than_its_bytes() {
    for n in [1, 100, 4095, 4096, 70_000, 600_000] {
        for dtype in [DType::UInt8, DType::BFloat16, DType::Float32, DType::Int64] {
            let noise = adversarial(dtype, n).find(|p| p.0 == "random").unwrap().1;
            let raw = noise.len();
            let file =
                save(&[Owned::new("noise", dtype, &[n as u64], noise)], WriteOptions::default());
            // 128 bytes and the name, 40 for each chunk; 4 KiB for the file.
            let chunks = raw.div_ceil(1 << 18);
            assert!(
                file.len() <= raw + 128 + 5 + 40 * chunks + 4096,
                "{dtype} {n}: {}",
                file.len()
            );
        }
    }
    let many: Vec<_> = (0..5000)
        .map(|i| Owned::new(format!("{i:04}"), DType::Float32, &[2, 3], vec![i as u8; 24]))
        .collect();
    let file = save(&many, WriteOptions::default());
    assert!(file.len() <= 5000 * (24 + 64 + 4) + 4096, "{}", file.len());
}

#[test]
fn contents_and_reports_are_kept() {
    let memory = Memory::default();
    let target = Target::Stream(Box::new(memory.clone()));
    let mut writer = Writer::create(target, WriteOptions::default()).unwrap();
    let data = mixed().remove(0);
    writer.write(&[TensorSource::new("w", data.dtype, &data.shape, &data.data)]).unwrap();
    let contents = Contents {
        tree: Some(serde_json::value::RawValue::from_string("[1,null]".into()).unwrap()),
        blobs: [("extra".to_owned(), vec![1, 2, 3])].into(),
        metadata: [("k".to_owned(), "v".to_owned())].into(),
    };
    let report = writer.finish(contents).unwrap();
    let bytes = memory.0.lock().unwrap().clone();
    assert_eq!(report.bytes_out, bytes.len() as u64);
    assert_eq!((report.tensors, report.bytes_in), (1, data.data.len() as u64));
    let bits: f64 = report.streams.values().map(|s| s.bits_per_value).sum();
    assert!((8.0..16.0).contains(&bits), "{:?}", report.streams);
    let reader = open(bytes).unwrap();
    assert_eq!(reader.digest().to_string(), report.digest);
    assert_eq!(reader.tree(), Some("[1,null]"));
    assert_eq!(reader.blob("extra").unwrap(), [1, 2, 3]);
    assert!(reader.blob("other").is_err());
    assert_eq!(reader.manifest().metadata["k"], "v");
    let inspection = reader.inspect(true).unwrap();
    assert_eq!(inspection.tensors[0].planes.len(), 2);
    assert!(inspection.ratio > 1.3);
}

#[test]
fn progress_reaches_the_total_and_can_cancel() {
    use std::sync::atomic::{AtomicU64, Ordering};
    let tensors = mixed();
    let total: u64 = tensors.iter().map(|t| t.data.len() as u64).sum();
    for threads in [1, 2] {
        let seen = std::sync::Arc::new(AtomicU64::new(0));
        let inner = seen.clone();
        let options = WriteOptions {
            threads: Some(threads),
            progress: Some(std::sync::Arc::new(move |p| {
                inner.store(p.done, Ordering::Relaxed);
                true
            })),
            ..WriteOptions::default()
        };
        let file = save(&tensors, options);
        assert_eq!(seen.load(Ordering::Relaxed), total);
        let stop: s4weights::ProgressFn = std::sync::Arc::new(|_| false);
        let options = WriteOptions { progress: Some(stop.clone()), ..WriteOptions::default() };
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.s4w");
        let e = save_to(path.as_path().into(), &tensors, options).unwrap_err();
        assert!(matches!(e, Error::Cancelled));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        let options =
            ReadOptions { threads: Some(threads), progress: Some(stop), ..ReadOptions::default() };
        let reader = Reader::open(Source::Bytes(file.into()), options).unwrap();
        assert!(matches!(reader.read("w"), Err(Error::Cancelled)));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_tensors_come_back(
        tensors in prop::collection::vec((0..DType::ALL.len(), 0usize..6000, any::<u64>(), 0u8..3), 1..6),
    ) {
        let owned: Vec<_> = tensors.iter().enumerate().map(|(i, &(dtype, n, seed, shape))| {
            let dtype = DType::ALL[dtype];
            let mut x = seed | 1;
            let data = (0..n * dtype.size()).map(|_| {
                x ^= x << 13; x ^= x >> 7; x ^= x << 17;
                // Noise, skewed bytes or a constant.
                match shape { 0 => x as u8, 1 => (x as u8) & (x >> 8) as u8 & 0x33, _ => seed as u8 }
            }).collect();
            Owned::new(format!("t{i}"), dtype, &[n as u64], data)
        }).collect();
        let file = save(&owned, WriteOptions { threads: Some(1), ..WriteOptions::default() });
        let reader = open(file).unwrap();
        for t in &owned {
            prop_assert!(reader.read(&t.name).unwrap() == t.data);
        }
    }
}

#[test]
fn tensors_in_memory_need_no_file() {
    let t = mixed().remove(2);
    let view = TensorView { dtype: t.dtype, shape: &t.shape, data: &t.data };
    for threads in [1, 2] {
        let options = MemoryOptions { preset: Preset::Fast, threads: Some(threads), simd: None };
        let codec = TensorCodec::new(options).unwrap();
        let c = codec.compress(&view).unwrap();
        assert!(c.bytes() < t.data.len());
        let mut out = vec![0; t.data.len()];
        codec.decompress(&c, &mut out).unwrap();
        assert!(out == t.data);
        assert!(codec.decompress(&c, &mut []).is_err());
    }
}

#[test]
fn what_was_written_in_part_is_not_published() {
    let memory = Memory::default();
    let target = Target::Stream(Box::new(memory.clone()));
    let mut writer = Writer::create(target, WriteOptions::default()).unwrap();
    let source = |name| TensorSource::new(name, DType::UInt8, &[2], &[7u8, 8][..]);
    writer.write(&[source("a")]).unwrap();
    // "b" is registered before the second "a" is refused.
    assert!(matches!(writer.write(&[source("b"), source("a")]), Err(Error::Argument(_))));
    writer.write(&[source("c")]).unwrap();
    assert!(matches!(writer.finish(Contents::default()), Err(Error::Argument(_))));
    assert!(open(memory.0.lock().unwrap().clone()).is_err());
}

#[test]
fn wrong_arguments_are_refused_by_name() {
    let mut writer =
        Writer::create(Target::Stream(Box::new(Memory::default())), WriteOptions::default())
            .unwrap();
    let mut write = |name, shape: &[u64], data: &[u8]| {
        let source = TensorSource::new(name, DType::Float32, shape, data);
        writer.write(&[source]).unwrap_err().to_string()
    };
    assert!(write("a", &[3], &[0; 8]).contains("`a`"));
    assert!(write("", &[2], &[0; 8]).contains("empty"));
    assert!(write("b", &[u64::MAX, 2], &[0; 8]).contains("`b`"));
    let e = writer.finish(Contents::default()).unwrap_err().to_string();
    assert!(e.contains("because writing tensors failed"), "{e}");
    assert_eq!("nvcomp".parse(), Ok(Preset::Nvcomp));
    assert!("best".parse::<Preset>().unwrap_err().contains("`balanced`"));
}
