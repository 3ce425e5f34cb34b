//! Preset `nvcomp`, and files that need closed codecs.
//!
//! Tests of the preset need a GPU and nvCOMP: without them they say so and pass; with `S4_REQUIRE_GPU=1`
//! they fail then.
#![expect(clippy::unwrap_used, reason = "tests")]

mod common;

use common::{Memory, Owned, mixed, open, save};
use s4weights::format::file::{FOOTER_LEN, Footer};
use s4weights::format::manifest::{ClosedCodec, Roles};
use s4weights::format::{CodecId, Digest, Error as FormatError};
use s4weights::{
    Contents, DType, Error, Manifest, Preset, ReadOptions, Reader, Source, Target, WriteOptions,
    Writer, adversarial,
};

const ANS: ClosedCodec = ClosedCodec { codec: CodecId::NVCOMP_ANS, library_major: 6 };

fn options() -> WriteOptions {
    WriteOptions { preset: Preset::Nvcomp, ..WriteOptions::default() }
}

fn read(bytes: Vec<u8>, trusted: bool) -> Reader {
    // One thread, so that an error names the first bad chunk.
    let options = ReadOptions { trusted, threads: Some(1), ..ReadOptions::default() };
    Reader::open(Source::Bytes(bytes.into()), options).unwrap()
}

fn is_unsupported(e: &Error) -> bool {
    matches!(e, Error::Format { source: FormatError::Unsupported { .. }, .. })
}

/// Whether the preset can be used here.
fn has_gpu() -> bool {
    let target = || Target::Stream(Box::new(Memory::default()));
    match Writer::create(target(), options()) {
        Ok(_) => true,
        Err(e) => {
            let required = std::env::var("S4_REQUIRE_GPU").is_ok_and(|v| v == "1");
            assert!(!required, "a GPU and nvCOMP are required: {e}");
            println!("skipped: {e}");
            assert!(is_unsupported(&e), "{e}");
            let text = e.to_string();
            for part in ["preset `nvcomp`", "GPU", "nvidia-libnvcomp-cu12", "NVCOMP_LIBRARY"] {
                assert!(text.contains(part), "{text}");
            }
            false
        }
    }
}

/// Replaces the manifest of a file.
fn with_manifest(file: &[u8], change: impl FnOnce(&mut Manifest)) -> Vec<u8> {
    let footer = Footer::parse(&file[file.len() - FOOTER_LEN..], file.len() as u64).unwrap();
    let at = usize::try_from(footer.offset).unwrap();
    let json = &file[at..at + usize::try_from(footer.len).unwrap()];
    let mut manifest = Manifest::parse_closed(json, footer.offset).unwrap();
    change(&mut manifest);
    let json = manifest.to_json().unwrap();
    let mut out = file[..at].to_vec();
    out.extend_from_slice(&json);
    let footer = Footer { len: json.len() as u64, digest: Digest::of(&json), ..footer };
    out.extend_from_slice(&footer.to_bytes());
    out
}

/// A file whose exponents are declared to be coded by `codec`, and its tensors. (No stream really is.)
fn closed_file(codec: &ClosedCodec) -> (Vec<u8>, Vec<Owned>) {
    let tensors = mixed();
    let mut file = save(&tensors, WriteOptions::default());
    // The header of the first chunk: the codec of its first stream.
    assert_eq!(file[16], CodecId::RANS.0);
    file[16] = codec.codec.0;
    let header = with_manifest(&file, |m| m.closed_codecs = vec![codec.clone()]);
    (header, tensors)
}

#[test]
fn the_list_of_closed_codecs_comes_back() {
    let (file, _) = closed_file(&ANS);
    let reader = open(file).unwrap();
    assert_eq!(reader.manifest().closed_codecs, [ANS]);
    assert_eq!(reader.inspect(false).unwrap().closed_codecs, ["nvcomp-ans 6"]);
    assert!(
        open(save(&mixed(), WriteOptions::default())).unwrap().manifest().closed_codecs.is_empty()
    );
}

#[test]
fn what_needs_no_closed_codec_is_read_without_trust() {
    let (file, tensors) = closed_file(&ANS);
    let reader = read(file, false);
    // The chunk whose header was changed is refused: by its checksum, before any codec sees it.
    for t in &tensors[1..] {
        assert!(reader.read(&t.name).unwrap() == t.data, "{}", t.name);
    }
    assert!(matches!(
        reader.read("w").unwrap_err(),
        Error::Format { source: FormatError::Corrupt { .. }, .. }
    ));
}

/// The patterns of a dtype, in tensors of several chunks, of one chunk, and packed.
fn patterns(dtype: DType) -> Vec<Owned> {
    let mut out = vec![];
    for n in [1, 77, 5000, 140_001] {
        for (name, data) in adversarial(dtype, n) {
            let shape = [(data.len() / dtype.size()) as u64];
            out.push(Owned::new(format!("{dtype}.{name}.{n}"), dtype, &shape, data));
        }
    }
    out.push(Owned::new(format!("{dtype}.empty"), dtype, &[0, 3], vec![]));
    out
}

#[test]
fn every_dtype_comes_back_through_the_preset() {
    if !has_gpu() {
        return;
    }
    for &dtype in DType::ALL {
        let tensors = patterns(dtype);
        let file = save(&tensors, options());
        let reader = read(file, true);
        assert_eq!(reader.manifest().preset, "nvcomp");
        for t in &tensors {
            assert!(reader.read(&t.name).unwrap() == t.data, "{}", t.name);
        }
        reader.verify().unwrap();
    }
}

#[test]
fn weights_get_smaller_by_ans_and_gdeflate_and_trust_is_asked_for() {
    if !has_gpu() {
        return;
    }
    let floats = [DType::BFloat16, DType::Float16, DType::Float32, DType::Float64];
    for dtype in floats {
        let data = adversarial(dtype, 300_000).find(|p| p.0 == "like-weights").unwrap().1;
        let shape = [(data.len() / dtype.size()) as u64];
        let tensor = Owned::new("w", dtype, &shape, data);
        let file = save(std::slice::from_ref(&tensor), options());
        let report = read(file.clone(), false).inspect(true).unwrap();
        assert_eq!(report.closed_codecs, ["nvcomp-ans 6"]);
        let ratio = report.ratio;
        assert!(ratio > 1.05, "{dtype}: {ratio}");
        println!("{dtype}: ratio {ratio:.4}");
        let planes = &report.tensors[0].planes;
        assert!(planes[1].codecs.contains(&"nvcomp-ans".to_owned()), "{planes:?}");
        if dtype == DType::BFloat16 {
            assert!(planes[2].codecs.contains(&"gdeflate".to_owned()), "{planes:?}");
        }
        // Without trust the codec is refused by name, as is another version of the library.
        let e = read(file.clone(), false).read("w").unwrap_err();
        let text = e.to_string();
        assert!(is_unsupported(&e), "{text}");
        for part in ["nvcomp-ans", "trusted=True", "s4w transcode", "`w`", "chunk 0"] {
            assert!(text.contains(part), "{text}");
        }
        let other = ClosedCodec { library_major: 5, ..ANS };
        let old = with_manifest(&file, |m| m.closed_codecs = vec![other]);
        let e = read(old, true).read("w").unwrap_err().to_string();
        assert!(e.contains("nvCOMP 5") && e.contains("version 6"), "{e}");
        // A stream of a codec that the manifest does not list is not decoded.
        let unlisted = with_manifest(&file, |m| m.closed_codecs = vec![]);
        assert!(is_unsupported(&read(unlisted, true).read("w").unwrap_err()));
        assert!(read(file, true).read("w").unwrap() == tensor.data);
    }
}

#[test]
fn integers_by_gdeflate_are_read_without_a_gpu_and_without_trust() {
    if !has_gpu() {
        return;
    }
    let mut tensors = vec![];
    for dtype in [DType::Int8, DType::UInt16, DType::Int32, DType::Int64, DType::Bool] {
        tensors.extend(patterns(dtype));
    }
    let file = save(&tensors, options());
    let reader = open(file).unwrap();
    assert!(reader.manifest().closed_codecs.is_empty());
    for t in &tensors {
        assert!(reader.read(&t.name).unwrap() == t.data, "{}", t.name);
    }
    let report = reader.inspect(true).unwrap();
    let codecs = report.tensors.iter().flat_map(|t| &t.planes).flat_map(|p| &p.codecs);
    assert!(codecs.filter(|c| *c == "gdeflate").count() > 10);
}

#[test]
fn damaged_files_of_the_preset_are_refused() {
    if !has_gpu() {
        return;
    }
    let tensors = mixed();
    let file = save(&tensors, options());
    for at in [17, 40, 70, 200, 5000, 100_000] {
        let mut bad = file.clone();
        bad[at] ^= 0x10;
        // The checksums of stored bytes and of values let no change through. (A changed gap counts, too.)
        let e = read(bad, true).verify().unwrap_err();
        let Error::Format { source, .. } = &e else { panic!("{at}: {e}") };
        let expected = [FormatError::corrupt(""), FormatError::truncated("")];
        let same = |e: &FormatError| std::mem::discriminant(e) == std::mem::discriminant(source);
        assert!(expected.iter().any(same), "{at}: {e}");
    }
}

#[test]
fn tree_roles_and_metadata_go_with_the_preset() {
    if !has_gpu() {
        return;
    }
    let memory = Memory::default();
    let mut writer = Writer::create(Target::Stream(Box::new(memory.clone())), options()).unwrap();
    let tensors = mixed();
    let sources: Vec<_> = tensors.iter().map(Owned::source).collect();
    writer.declare(Roles::default()).unwrap();
    writer.write(&sources).unwrap();
    let contents = Contents { metadata: [("a".into(), "b".into())].into(), ..Contents::default() };
    writer.finish(contents).unwrap();
    let file = std::mem::take(&mut *memory.0.lock().unwrap());
    let reader = read(file, true);
    assert_eq!(reader.manifest().metadata["a"], "b");
    assert_eq!(reader.manifest().roles, Some(Roles::default()));
    for t in &tensors {
        assert!(reader.read(&t.name).unwrap() == t.data, "{}", t.name);
    }
}

/// A tensor of many groups of chunks, on all threads; prints the speed.
#[test]
fn large_tensors_come_back_at_a_measured_speed() {
    if !has_gpu() {
        return;
    }
    let n = 64_000_000;
    for dtype in [DType::BFloat16, DType::Float32] {
        let piece = adversarial(dtype, n / 32).find(|p| p.0 == "like-weights").unwrap().1;
        let tensor = Owned::new("w", dtype, &[n as u64], piece.repeat(32));
        let gigabytes = tensor.data.len() as f64 / 1e9;
        let memory = Memory::default();
        let target = Target::Stream(Box::new(memory.clone()));
        let start = std::time::Instant::now();
        let mut writer = Writer::create(target, options()).unwrap();
        let opened = start.elapsed().as_secs_f64();
        let start = std::time::Instant::now();
        writer.write(&[tensor.source()]).unwrap();
        let saved = start.elapsed().as_secs_f64();
        writer.finish(Contents::default()).unwrap();
        let file = std::mem::take(&mut *memory.0.lock().unwrap());
        let ratio = tensor.data.len() as f64 / file.len() as f64;
        let reader = read(file, true);
        let mut back = vec![1; tensor.data.len()];
        let start = std::time::Instant::now();
        reader.read_into(&mut [(0, &mut back)]).unwrap();
        let loaded = start.elapsed().as_secs_f64();
        assert!(back == tensor.data);
        println!(
            "{dtype}, {gigabytes:.3} GB, ratio {ratio:.4}: opened in {opened:.2} s, saved at {:.2} \
             GB/s, loaded at {:.2} GB/s",
            gigabytes / saved,
            gigabytes / loaded
        );
    }
}
