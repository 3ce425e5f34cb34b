//! The program `s4w`, run as its users run it.

#[cfg(target_os = "linux")]
mod in_time;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn s4w(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_s4w")).args(arguments).output().expect("the program starts")
}

fn text(out: &Output) -> String {
    String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr)
}

/// Real checkpoints: fp32 and bf16 weights and moments.
fn samples() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata");
    let mut files: Vec<_> = std::fs::read_dir(folder)
        .expect("testdata is there")
        .filter_map(|e| Some(e.ok()?.path()))
        .filter(|p| p.extension().is_some_and(|e| e == "safetensors"))
        .collect();
    files.sort();
    assert!(files.len() >= 4, "{files:?}");
    files
}

#[test]
fn real_checkpoints_come_back_bit_by_bit() {
    let dir = tempfile::tempdir().unwrap();
    for sample in samples() {
        let sample = sample.to_str().unwrap();
        let packed = dir.path().join("a.s4w");
        let packed = packed.to_str().unwrap();
        let back = dir.path().join("b.safetensors");
        let back = back.to_str().unwrap();
        for simd in ["scalar", ""] {
            let mut arguments = vec!["compress", sample, packed, "-qf", "--threads", "2"];
            if !simd.is_empty() {
                arguments.extend(["--simd", simd]);
            }
            let out = s4w(&arguments);
            assert!(out.status.success() && text(&out).contains("ratio 1."), "{}", text(&out));
            assert!(s4w(&["verify", packed]).status.success());
            let out = s4w(&["decompress", packed, back, "--force"]);
            assert!(out.status.success(), "{}", text(&out));
            let (a, b) = (std::fs::read(sample).unwrap(), std::fs::read(back).unwrap());
            let a = safetensors::SafeTensors::deserialize(&a).unwrap();
            let b = safetensors::SafeTensors::deserialize(&b).unwrap();
            assert_eq!(a.len(), b.len());
            for (name, tensor) in a.tensors() {
                let other = b.tensor(&name).unwrap();
                assert_eq!((tensor.dtype(), tensor.shape()), (other.dtype(), other.shape()));
                assert!(tensor.data() == other.data(), "{name}");
            }
        }
    }
}

#[test]
fn inspect_tells_planes_as_text_and_as_json() {
    let dir = tempfile::tempdir().unwrap();
    let packed = dir.path().join("a.s4w");
    let packed = packed.to_str().unwrap();
    assert!(s4w(&["compress", samples()[0].to_str().unwrap(), packed]).status.success());
    let out = text(&s4w(&["inspect", "--bits", packed]));
    assert!(
        out.contains("exponent") && out.contains("rans") && out.contains("format    0.2"),
        "{out}"
    );
    let json = text(&s4w(&["inspect", "--bits", "--json", packed]));
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["form"], "tensors");
    assert!(json["tensors"].as_array().unwrap().iter().any(|t| t["planes"].is_array()));
}

#[test]
fn the_selftest_passes_and_can_fail() {
    let out = s4w(&["selftest", "--threads", "2"]);
    assert!(out.status.success(), "{}", text(&out));
    let out = s4w(&["selftest", "--inject-fault"]);
    assert_eq!(out.status.code(), Some(1), "{}", text(&out));
}

#[test]
fn a_required_gpu_is_tested_or_missed() {
    let required = std::env::var("S4_REQUIRE_GPU").is_ok_and(|v| v == "1");
    let gpu = s4weights::cuda::Cuda::discover();
    let out = s4w(&["selftest", "--require-gpu", "--simd", "scalar"]);
    let fault = s4w(&["selftest", "--require-gpu", "--inject-fault"]);
    if let Err(e) = gpu {
        assert!(!required, "{e}");
        assert_eq!(out.status.code(), Some(4), "{}", text(&out));
        assert!(String::from_utf8_lossy(&out.stderr).contains("a GPU is required"));
        assert_eq!(fault.status.code(), Some(4));
        return;
    }
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    assert!(text(&out).contains("passed on"), "{}", text(&out));
    assert_eq!(fault.status.code(), Some(1), "{}", text(&fault));
    assert!(String::from_utf8_lossy(&fault.stderr).contains("every injected fault was detected"));
}

#[test]
fn a_dash_is_no_file_name() {
    let dir = tempfile::tempdir().unwrap();
    let sample = samples()[0].clone();
    let sample = sample.to_str().unwrap();
    for arguments in [
        &["compress", "-"][..],
        &["compress", sample, "-"],
        &["decompress", "-"],
        &["decompress", "a.s4w", "-"],
        &["inspect", "-"],
        &["verify", "-"],
        &["transcode", "-", "b.s4w"],
        &["transcode", "a.s4w", "-"],
        &["store", "ls", "-"],
        &["store", "init", "-"],
        &["store", "restore", "a", "1", "-"],
    ] {
        let out =
            Command::new(env!("CARGO_BIN_EXE_s4w")).args(arguments).current_dir(&dir).output();
        let out = out.unwrap();
        assert_eq!(out.status.code(), Some(2), "{arguments:?}: {}", text(&out));
        assert!(text(&out).contains("standard input and output"), "{arguments:?}: {}", text(&out));
    }
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0, "nothing is written");
    let mut named = Command::new(env!("CARGO_BIN_EXE_s4w"));
    assert!(named.args(["compress", sample, "./-"]).current_dir(&dir).status().unwrap().success());
    assert!(dir.path().join("-").is_file());
}

#[cfg(unix)]
#[test]
fn an_argument_that_is_not_text_is_named() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    let say = |arguments: &[&[u8]]| {
        let arguments = arguments.iter().map(|bytes| OsStr::from_bytes(bytes));
        let out = Command::new(env!("CARGO_BIN_EXE_s4w")).args(arguments).output().unwrap();
        assert_eq!(out.status.code(), Some(2));
        text(&out)
    };
    let told = say(&[b"transcode", b"a.s4w", b"b\xff.s4w"]);
    assert_eq!(told, "s4w: argument 3 (`b\u{fffd}.s4w`) is not text: UTF-8 is expected\n");
    // What may be a secret is not repeated.
    let told = say(&[b"store", b"ls", b"s3://b/x?sig=hush\xff", b"-o", b"secret=hush\xff"]);
    assert!(told.contains("argument 3 (`s3://b/x`), argument 5 (`secret`)"), "{told}");
    assert!(!told.contains("hush"), "{told}");
}

#[test]
fn exit_codes_are_those_of_the_help() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let code = |arguments: &[&str]| s4w(arguments).status.code();
    assert_eq!(code(&[]), Some(2));
    assert_eq!(code(&["compress", "x", "--preset", "huge"]), Some(2));
    assert_eq!(code(&["selftest", "--threads", "0"]), Some(2));
    assert_eq!(code(&["compress", "x.safetensors", "--simd", "neon"]).map(|c| c >= 2), Some(true));
    assert_eq!(code(&["verify", &path("missing.s4w")]), Some(3));
    assert_eq!(code(&["compress", &path("missing.safetensors")]), Some(3));
    assert_eq!(code(&["compress", &path("x.pt")]), Some(4));
    std::fs::write(path("junk.safetensors"), [255; 100]).unwrap();
    assert_eq!(code(&["compress", &path("junk.safetensors")]), Some(1));
    let sample = samples()[0].clone();
    let sample = sample.to_str().unwrap();
    assert_eq!(code(&["compress", sample, &path("no/folder/a.s4w")]), Some(3));
    assert_eq!(code(&["compress", sample, &path("a.s4w")]), Some(0));
    let mut bytes = std::fs::read(path("a.s4w")).unwrap();
    bytes[10] = 77;
    std::fs::write(path("a.s4w"), &bytes).unwrap();
    let out = s4w(&["inspect", &path("a.s4w")]);
    assert_eq!(out.status.code(), Some(4));
    assert!(text(&out).contains("format 0.77"), "{}", text(&out));
    bytes[10] = 2;
    bytes[5000] ^= 1;
    std::fs::write(path("a.s4w"), &bytes).unwrap();
    assert_eq!(code(&["verify", &path("a.s4w")]), Some(1));
    assert_eq!(code(&["decompress", &path("a.s4w"), &path("b.safetensors")]), Some(1));
    assert!(!dir.path().join("b.safetensors").exists());
    let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().collect();
    assert_eq!(left.len(), 2, "{left:?}");
    // A preset that needs a GPU is refused by name where there is none.
    let out = s4w(&["compress", sample, &path("c.s4w"), "--preset", "nvcomp"]);
    let done = out.status.success();
    assert!(done || out.status.code() == Some(4) && text(&out).contains("GPU"), "{}", text(&out));
}

#[test]
fn transcoded_files_hold_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (from, to) = (path("a.s4w"), path("b.s4w"));
    let sample = samples()[0].clone();
    assert!(s4w(&["compress", sample.to_str().unwrap(), &from]).status.success());
    let out = s4w(&["transcode", &from, &to, "--preset", "fast", "--quiet"]);
    assert!(out.status.success() && text(&out).contains("compared"), "{}", text(&out));
    assert!(s4w(&["verify", &to]).status.success());
    for name in ["a", "b"] {
        let back = path(&format!("{name}.safetensors"));
        assert!(s4w(&["decompress", &path(&format!("{name}.s4w")), &back]).status.success());
    }
    let read = |name| std::fs::read(path(name)).unwrap();
    let (a, b) = (read("a.safetensors"), read("b.safetensors"));
    let tensors = |bytes| safetensors::SafeTensors::deserialize(bytes).unwrap();
    let (a, b) = (tensors(&a), tensors(&b));
    assert!(a.len() == b.len() && !a.is_empty());
    for (name, tensor) in a.tensors() {
        assert!(tensor.data() == b.tensor(&name).unwrap().data(), "{name}");
    }
    // Neither onto itself nor into a closed file; a damaged input leaves no output.
    let code = |arguments: &[&str]| s4w(arguments).status.code();
    assert_eq!(code(&["transcode", &from, &from]), Some(2));
    assert_eq!(code(&["transcode", &from, &path("c.s4w"), "--preset", "nvcomp"]), Some(2));
    let mut bytes = read("a.s4w");
    bytes[5000] ^= 1;
    std::fs::write(&from, &bytes).unwrap();
    assert_eq!(code(&["transcode", &from, &path("c.s4w")]), Some(1));
    assert!(!Path::new(&path("c.s4w")).exists());
}

#[test]
fn nothing_is_written_over_its_input() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let sample = std::fs::read(&samples()[0]).unwrap();
    let plain = path("a.safetensors");
    std::fs::write(&plain, &sample).unwrap();
    assert!(s4w(&["compress", &plain]).status.success());
    let packed = std::fs::read(path("a.s4w")).unwrap();
    std::fs::create_dir(path("sub")).unwrap();
    let mut names = vec!["a".to_owned(), "./a".into(), "sub/../a".into()];
    #[cfg(unix)]
    for ending in ["safetensors", "s4w"] {
        let link = |name: &str| path(&format!("{name}.{ending}"));
        std::os::unix::fs::symlink(link("a"), link("soft")).unwrap();
        std::fs::hard_link(link("a"), link("hard")).unwrap();
    }
    #[cfg(unix)]
    names.extend(["soft".to_owned(), "hard".to_owned()]);
    for name in &names {
        for (verb, ending) in [("compress", "safetensors"), ("transcode", "s4w")] {
            let input = format!("a.{ending}");
            for output in [format!("{name}.{ending}"), path(&format!("{name}.{ending}"))] {
                let out = Command::new(env!("CARGO_BIN_EXE_s4w"))
                    .args([verb, &input, &output, "--force"])
                    .current_dir(dir.path())
                    .output()
                    .unwrap();
                assert_eq!(out.status.code(), Some(2), "{verb} {output}: {}", text(&out));
                assert!(text(&out).contains("the same file"), "{}", text(&out));
            }
        }
    }
    let url = format!("file://{plain}");
    assert_eq!(s4w(&["compress", &plain, &url, "--force"]).status.code(), Some(2));
    // The output is recognised as the input also through a link whose name `decompress` would accept.
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink(path("a.s4w"), path("c.safetensors")).unwrap();
        let out = s4w(&["decompress", &path("a.s4w"), &path("c.safetensors"), "-f"]);
        assert_eq!(out.status.code(), Some(2), "{}", text(&out));
    }
    // By default, the output for a .s4w file would be that file itself.
    assert_eq!(s4w(&["compress", &path("a.s4w")]).status.code(), Some(2));
    assert!(std::fs::read(&plain).unwrap() == sample);
    assert!(std::fs::read(path("a.s4w")).unwrap() == packed);
}

#[test]
fn what_is_there_is_replaced_only_by_force() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let plain = path("a.safetensors");
    std::fs::copy(&samples()[0], &plain).unwrap();
    assert!(s4w(&["compress", &plain]).status.success());
    let packed = path("a.s4w");
    let (old, mine) = (path("b.s4w"), path("b.safetensors"));
    let cases = [
        vec!["compress", &plain, &old],
        vec!["transcode", &packed, &old],
        vec!["decompress", &packed, &mine],
    ];
    for case in &cases {
        let output = case[2];
        std::fs::write(output, "mine").unwrap();
        let out = s4w(case);
        assert_eq!(out.status.code(), Some(5), "{case:?}: {}", text(&out));
        assert!(text(&out).contains(output) && text(&out).contains("--force"), "{}", text(&out));
        assert_eq!(std::fs::read(output).unwrap(), b"mine");
        let url = format!("file://{output}");
        if case[0] != "decompress" {
            assert_eq!(s4w(&[case[0], case[1], &url]).status.code(), Some(5));
        }
        let out = s4w(&[&case[..], &["-f"]].concat());
        assert!(out.status.success(), "{case:?}: {}", text(&out));
        assert!(std::fs::metadata(output).unwrap().len() > 1000);
    }
    // The default output is no exception.
    assert_eq!(s4w(&["compress", &plain]).status.code(), Some(5));
    assert_eq!(s4w(&["decompress", &packed]).status.code(), Some(5));
    let left = std::fs::read_dir(dir.path()).unwrap().count();
    assert_eq!(left, 4);
}

#[cfg(unix)]
#[test]
fn files_have_the_permissions_that_the_manual_promises() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let mode = |name: &str| std::fs::metadata(path(name)).unwrap().permissions().mode() & 0o777;
    std::fs::write(path("any"), "").unwrap();
    assert!(s4w(&["compress", samples()[0].to_str().unwrap(), &path("a.s4w")]).status.success());
    assert!(s4w(&["decompress", &path("a.s4w")]).status.success());
    assert_eq!((mode("a.s4w"), mode("a.safetensors")), (mode("any"), mode("any")));
    std::fs::set_permissions(path("a.safetensors"), PermissionsExt::from_mode(0o640)).unwrap();
    assert!(s4w(&["decompress", "-f", &path("a.s4w")]).status.success());
    assert_eq!(mode("a.safetensors"), 0o640);
}

#[test]
fn sound_files_of_other_formats_are_not_called_damaged() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let said = |arguments: &[&str], code: i32| {
        let out = s4w(arguments);
        assert_eq!(out.status.code(), Some(code), "{arguments:?}: {}", text(&out));
        text(&out)
    };
    std::fs::copy(&samples()[0], path("a.safetensors")).unwrap();
    said(&["compress", &path("a.safetensors"), &path("b.s4w")], 0);
    let zip = [b"PK\x03\x04".as_slice(), &[0; 100]].concat();
    let files: [(&str, &[u8], &str); 5] = [
        ("a.pt", &zip, "a PyTorch file or another archive"),
        ("zip.s4w", &zip, "a PyTorch file or another archive"),
        ("old.pt", b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.", "a PyTorch file"),
        ("notes.txt", b"a text that is longer than a header", "not a .s4w file"),
        ("a.safetensors", &[], "a safetensors file, not a .s4w file"),
    ];
    for (name, bytes, what) in files {
        if !bytes.is_empty() {
            std::fs::write(path(name), bytes).unwrap();
        }
        let (file, out) = (path(name), path("out.s4w"));
        let back = path("out.safetensors");
        for words in [&["verify", &file][..], &["inspect", &file], &["transcode", &file, &out]] {
            let text = said(words, 4);
            assert!(text.contains(what) && text.contains(name), "{text}");
            assert!(!text.contains("corrupt"), "{text}");
        }
        said(&["decompress", &file, &back], 4);
    }
    assert!(said(&["compress", &path("b.s4w"), &path("c.s4w")], 4).contains("a .s4w file already"));
    assert!(said(&["compress", &path("notes.txt")], 4).contains("not a safetensors file"));
    assert!(said(&["compress", &path("zip.s4w"), &path("c.s4w")], 4).contains("Python wheel"));
    assert!(
        said(&["compress", dir.path().to_str().unwrap(), &path("c.s4w")], 4)
            .contains("a folder of torch.distributed.checkpoint")
    );
    // A .s4w file that is no other format either is damaged; so is a file that ends as a .s4w file does.
    std::fs::write(path("zeros.s4w"), [0; 5000]).unwrap();
    said(&["verify", &path("zeros.s4w")], 1);
    let mut bytes = std::fs::read(path("b.s4w")).unwrap();
    bytes[0] = 0;
    std::fs::write(path("ours"), &bytes).unwrap();
    assert!(said(&["verify", &path("ours")], 1).contains("corrupt data"));
    // Truncated safetensors files are damaged, too.
    for len in [0, 5, 1000] {
        let bytes = std::fs::read(path("a.safetensors")).unwrap();
        std::fs::write(path("cut.safetensors"), &bytes[..len]).unwrap();
        said(&["compress", &path("cut.safetensors")], 1);
    }
    assert!(!Path::new(&path("c.s4w")).exists() && !Path::new(&path("out.s4w")).exists());
}

#[test]
fn tensors_are_written_to_safetensors_files_only_and_others_told_of() {
    use s4weights::{Contents, DType, TensorSource, Writer};
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let write = |name: &str, contents: Contents| {
        let mut writer =
            Writer::create(path(name).as_str().into(), Default::default()).expect("created");
        let source = TensorSource::new("w", DType::UInt8, &[3], &[1, 2, 3][..]);
        writer.write(&[source]).expect("written");
        writer.finish(contents).expect("finished");
    };
    let tree = |json: &str| Contents {
        tree: Some(serde_json::value::RawValue::from_string(json.to_owned()).expect("JSON")),
        ..Contents::default()
    };
    let blob = |name: &str| Contents {
        blobs: [(name.to_owned(), b"x".to_vec())].into(),
        ..Contents::default()
    };
    let tensor = r#"["w",{"tensor":0}]"#;
    write("flat.s4w", tree(&format!(r#"{{"root":{{"dict":[{tensor}]}}}}"#)));
    write("step.s4w", tree(&format!(r#"{{"root":{{"dict":[{tensor},["step",7]]}}}}"#)));
    write("pickle.s4w", blob("pickle"));
    write("dcp.s4w", blob("dcp"));
    write("blob.s4w", blob("mine"));
    let out = s4w(&["decompress", &path("flat.s4w")]);
    assert!(out.status.success() && out.stderr.is_empty(), "{}", text(&out));
    for back in [None, Some(path("pickle.safetensors"))] {
        let out =
            s4w(&[vec!["decompress".to_owned(), path("pickle.s4w")], back.into_iter().collect()]
                .concat()
                .iter()
                .map(String::as_str)
                .collect::<Vec<_>>());
        assert_eq!(out.status.code(), Some(4), "{}", text(&out));
        assert!(text(&out).contains("only PyTorch can tell"), "{}", text(&out));
        assert!(!dir.path().join("pickle.safetensors").exists());
    }
    for (name, what) in [
        ("step.s4w", "1 value that is not a tensor"),
        ("dcp.s4w", "in pieces"),
        ("blob.s4w", "the blobs mine"),
    ] {
        let back = path(name).replace(".s4w", ".safetensors");
        let out = s4w(&["decompress", &path(name)]);
        assert_eq!(out.status.code(), Some(4), "{}", text(&out));
        assert!(text(&out).contains(what) && text(&out).contains(".pt file"), "{}", text(&out));
        assert!(!Path::new(&back).exists());
        // A user who names the output wants the tensors, and is told what is left out.
        let out = s4w(&["decompress", &path(name), &back]);
        let heard = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success() && heard.contains(what), "{heard}");
        let out = s4w(&["decompress", &path(name), &back, "-qf"]);
        assert!(out.status.success() && out.stderr.is_empty(), "{}", text(&out));
    }
    let url = format!("file://{}", path("u.safetensors"));
    for output in [path("b.xyz"), path("b.s4w"), path("b"), path("b.pt"), url] {
        let out = s4w(&["decompress", &path("flat.s4w"), &output]);
        assert_eq!(out.status.code(), Some(4), "{output}: {}", text(&out));
        assert!(text(&out).contains(".safetensors file"), "{}", text(&out));
        assert!(!Path::new(&output).exists());
    }
    // The error names the output, which cannot be written.
    let out = s4w(&["decompress", &path("flat.s4w"), &path("no/x.safetensors")]);
    assert_eq!(out.status.code(), Some(3), "{}", text(&out));
    assert!(text(&out).contains("no/x.safetensors"), "{}", text(&out));
}

/// The file with another manifest, and hashes that match it.
fn with_manifest(file: &[u8], change: impl FnOnce(&mut s4weights::Manifest)) -> Vec<u8> {
    use s4weights::format::file::Footer;
    let footer = Footer::parse(file, file.len() as u64).expect("a sound file");
    let (start, end) = (footer.offset as usize, (footer.offset + footer.len) as usize);
    let json = &file[start..end];
    let mut manifest = s4weights::Manifest::parse(json, footer.offset).expect("a sound manifest");
    change(&mut manifest);
    let json = manifest.to_json().expect("plain values");
    let digest = s4weights::format::Digest::of(&json);
    let footer = Footer { len: json.len() as u64, digest, ..footer };
    [&file[..start], &json, &footer.to_bytes()].concat()
}

#[test]
fn files_that_need_a_closed_codec_can_be_looked_at() {
    use s4weights::format::{CodecId, manifest::ClosedCodec};
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.s4w");
    let packed = path.to_str().unwrap();
    assert!(s4w(&["compress", samples()[0].to_str().unwrap(), packed]).status.success());
    let closed = with_manifest(&std::fs::read(&path).unwrap(), |m| {
        m.closed_codecs = vec![ClosedCodec { codec: CodecId::NVCOMP_ANS, library_major: 6 }];
    });
    std::fs::write(&path, closed).unwrap();
    let out = s4w(&["inspect", packed]);
    assert!(out.status.success(), "{}", text(&out));
    assert!(text(&out).contains("needs     nvcomp-ans 6: a closed codec"), "{}", text(&out));
    let json = text(&s4w(&["inspect", "--bits", "--json", packed]));
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["closed_codecs"], serde_json::json!(["nvcomp-ans 6"]));
    // No chunk actually uses the closed codec, and open chunks are read anywhere.
    assert!(s4w(&["verify", packed]).status.success());
}

/// The file with the first stream of its first chunk declared to be nvCOMP's ANS, and matching
/// hashes and checksums: what a stranger's file may look like.
#[expect(clippy::unwrap_used, reason = "what tests share")]
fn of_closed_codec(mut file: Vec<u8>) -> Vec<u8> {
    use s4weights::format::{ChunkRecord, CodecId, Digest, StreamEntry, crc32c, layout};
    use s4weights::format::{file::Footer, index, manifest::ClosedCodec};
    let footer = Footer::parse(&file, file.len() as u64).unwrap();
    let (start, end) = (footer.offset as usize, (footer.offset + footer.len) as usize);
    let manifest = s4weights::Manifest::parse(&file[start..end], footer.offset).unwrap();
    let section = manifest.tensors.section;
    let table = section.offset as usize..(section.offset + section.bytes) as usize;
    let plans = manifest.plans.len();
    let mut tensors = index::parse_table(&file[table.clone()], footer.offset, plans).unwrap();
    let t =
        tensors.iter_mut().find(|t| matches!(t.kind, index::TensorKind::Chunks { .. })).unwrap();
    let (width, plan) = (t.dtype.value_width(), usize::from(t.plan));
    let values = t.values().unwrap();
    let index::TensorKind::Chunks { block, chunk_log2, .. } = &mut t.kind else { panic!() };
    let place = block.offset as usize..block.offset as usize + block.len as usize;
    let chunks = index::chunk_count(values, *chunk_log2);
    let (side, records) = index::split_block(&file[place.clone()], block, chunks).unwrap();
    let (side, mut records) = (side.to_vec(), ChunkRecord::parse_table(records).unwrap());
    let first = &mut records[0];
    assert!(!first.plain);
    let frame = first.offset as usize..first.offset as usize + first.len as usize;
    file[frame.start] = CodecId::NVCOMP_ANS.0;
    file[frame.start + 1] = 0;
    let planes = layout::Planes::new(manifest.plans[plan].layout, width, 1).unwrap().sizes().len();
    first.crc_encoded = StreamEntry::parse_chunk(&file[frame], planes).unwrap().crc();
    let mut bytes = side;
    records.iter().for_each(|r| r.write(&mut bytes));
    block.crc = crc32c(&bytes);
    file[place].copy_from_slice(&bytes);
    let bytes = index::write_table(&tensors).unwrap();
    file[table].copy_from_slice(&bytes);
    let chunks = Digest::of(&file[..manifest.objects[0].bytes as usize]);
    with_manifest(&file, |m| {
        m.tensors.section.blake3 = Digest::of(&bytes);
        m.objects[0].blake3 = chunks;
        m.closed_codecs = vec![ClosedCodec { codec: CodecId::NVCOMP_ANS, library_major: 6 }];
    })
}

#[test]
fn closed_codecs_are_decoded_only_when_the_user_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (packed, back) = (path("a.s4w"), path("b.safetensors"));
    assert!(s4w(&["compress", samples()[0].to_str().unwrap(), &packed]).status.success());
    let closed = of_closed_codec(std::fs::read(&packed).unwrap());
    std::fs::write(&packed, closed).unwrap();
    let verbs = [vec!["verify", &packed], vec!["decompress", &packed, &back]];
    for verb in verbs {
        let out = s4w(&verb);
        assert_eq!(out.status.code(), Some(4), "{}", text(&out));
        for part in ["nvcomp-ans", "`--trusted`", "chunk 0", "s4w transcode"] {
            assert!(text(&out).contains(part), "{part}: {}", text(&out));
        }
        // If trusted, it depends on the machine. No encoder wrote these bytes, so this is not tried on a GPU.
        if !has_nvidia() {
            let out = s4w(&[&verb[..], &["--trusted"]].concat());
            assert_eq!(out.status.code(), Some(4), "{}", text(&out));
            assert!(text(&out).contains("needs an NVIDIA GPU and nvCOMP 6"), "{}", text(&out));
        }
        assert!(!Path::new(&back).exists());
    }
}

/// Whether there may be a GPU.
fn has_nvidia() -> bool {
    Path::new("/dev/nvidiactl").exists() || std::env::var_os("NVCOMP_LIBRARY").is_some()
}

/// A .safetensors file with a tensor of this many random values, and metadata.
fn large(path: &Path, values: usize) {
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f32::from_bits(0x3c00_0000 + (state >> 8)).to_le_bytes()
    };
    let data: Vec<u8> = (0..values).flat_map(|_| next()).collect();
    let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![values], &data);
    let metadata = (0..40).map(|i| (format!("key {i}"), format!("\u{e9} \"{i}\""))).collect();
    let view = [("w", view.expect("as many bytes as values"))];
    safetensors::serialize_to_file(view, Some(metadata), path).expect("is written");
}

#[test]
#[cfg(unix)]
fn a_signal_leaves_nothing_half_written() {
    use std::os::unix::process::ExitStatusExt;

    let dir = tempfile::tempdir().unwrap();
    let (raw, packed) = (dir.path().join("a.safetensors"), dir.path().join("a.s4w"));
    let names = || {
        let names = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name());
        names.map(|n| n.into_string().unwrap()).collect::<std::collections::BTreeSet<_>>()
    };
    large(&raw, 24 << 20);
    let done = s4w(&["compress", raw.to_str().unwrap(), packed.to_str().unwrap()]);
    assert!(done.status.success(), "{}", text(&done));
    let before = names();
    // Where these tests run in the background, INT or HUP may be ignored, by what they start, too.
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.map_or(0, |mask| u64::from_str_radix(mask.trim(), 16).unwrap());
    for (signal, number, verb, from, to) in [
        ("INT", 2, "compress", &raw, "b.s4w"),
        ("TERM", 15, "transcode", &packed, "b.s4w"),
        ("HUP", 1, "decompress", &packed, "b.safetensors"),
    ] {
        let is_ignored = ignored >> (number - 1) & 1 == 1;
        let (signal, number) = if is_ignored { ("TERM", 15) } else { (signal, number) };
        let to = dir.path().join(to);
        let signalled = || {
            let mut command = Command::new(env!("CARGO_BIN_EXE_s4w"));
            let command = command.args([verb, "--threads", "1"]).args([from, &to]);
            let mut child = command.stderr(std::process::Stdio::piped()).spawn().unwrap();
            while names() == before && child.try_wait().unwrap().is_none() {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            let id = child.id().to_string();
            assert!(Command::new("kill").args(["-s", signal, &id]).status().unwrap().success());
            let out = child.wait_with_output().unwrap();
            // If it was done already, that shows nothing.
            let too_late = out.status.success();
            if too_late {
                std::fs::remove_file(&to).unwrap();
            }
            (!too_late).then_some(out)
        };
        let out = (0..8).find_map(|_| signalled()).expect("a signal while it works");
        assert_eq!(
            (out.status.code(), out.status.signal()),
            (Some(128 + number), None),
            "{verb}: {}",
            text(&out)
        );
        assert!(text(&out).contains("interrupted"), "{verb}: {}", text(&out));
        assert_eq!(names(), before, "{verb}");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_second_signal_ends_what_does_not_stop() {
    use std::time::Duration;

    let dir = tempfile::tempdir().unwrap();
    let packed = dir.path().join("a.s4w");
    let done = s4w(&["compress", samples()[0].to_str().unwrap(), packed.to_str().unwrap()]);
    assert!(done.status.success(), "{}", text(&done));
    // Nobody reads from it: opening it does not return.
    let pipe = dir.path().join("a.safetensors");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let term = 15;
    let signalled = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_s4w"));
        let command = command.args(["decompress", "--quiet"]).args([&packed, &pipe]);
        let command = command.stderr(std::process::Stdio::piped());
        let mut child = command.spawn().unwrap();
        let id = child.id().to_string();
        let handles_it = || {
            let status = std::fs::read_to_string(format!("/proc/{id}/status")).unwrap();
            let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
            u64::from_str_radix(mask.trim(), 16).unwrap() >> (term - 1) & 1 == 1
        };
        while !handles_it() {
            std::thread::sleep(Duration::from_millis(1));
        }
        // Signals of a kind that are sent before the first was read count as one.
        while child.try_wait().unwrap().is_none() {
            assert!(Command::new("kill").args(["-s", "TERM", &id]).status().unwrap().success());
            std::thread::sleep(Duration::from_millis(50));
        }
        child.wait_with_output().unwrap()
    };
    // The first signal alone ends it after ten seconds.
    let out = in_time::in_time(9.0, signalled);
    assert_eq!(out.status.code(), Some(128 + term), "{}", text(&out));
    assert_eq!(text(&out), "s4w: interrupted before the cleanup was done\n");
}

#[test]
fn the_same_input_gives_the_same_safetensors_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    large(Path::new(&path("a.safetensors")), 1000);
    assert!(s4w(&["compress", &path("a.safetensors"), &path("a.s4w")]).status.success());
    let files: Vec<_> = (0..4)
        .map(|i| {
            let to = path(&format!("{i}.safetensors"));
            let out = s4w(&["decompress", &path("a.s4w"), &to]);
            assert!(out.status.success(), "{}", text(&out));
            std::fs::read(to).unwrap()
        })
        .collect();
    assert!(files.iter().all(|file| *file == files[0]));
    let (_, header) = safetensors::SafeTensors::read_metadata(&files[0]).unwrap();
    let metadata = header.metadata().as_ref().unwrap();
    assert_eq!(metadata["key 7"], "\u{e9} \"7\"");
    assert_eq!(metadata.len(), 40);
}
