//! Tensors as they were saved come out of `s4w decompress` and `s4w store restore`, not the memory that they were in.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Output};

use s4weights::{Contents, DType, TensorSource, Writer};
use safetensors::Dtype;

type Found = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn s4w(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_s4w")).args(arguments).output().expect("the program starts")
}

fn said(out: &Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

/// Writes a file of two tensors, the bytes 0 to 11 and four 16-bit numbers, that this tree describes.
fn write(path: &str, root: &str) {
    let mut writer = Writer::create(path.into(), Default::default()).expect("created");
    let bytes: Vec<u8> = (0..12).collect();
    let numbers: Vec<u8> = [1_i16, -2, 3, -4].iter().flat_map(|n| n.to_le_bytes()).collect();
    // In one call, these would be compared, too.
    writer.write(&[TensorSource::new("a", DType::UInt8, &[12], &bytes[..])]).expect("written");
    writer.write(&[TensorSource::new("b", DType::Int16, &[4], &numbers[..])]).expect("written");
    let tree = serde_json::value::RawValue::from_string(format!("{{\"root\":{root}}}"));
    let contents = Contents { tree: Some(tree.expect("JSON")), ..Contents::default() };
    writer.finish(contents).expect("finished");
}

fn read(path: &str) -> Found {
    let bytes = std::fs::read(path).expect("was written");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let tensors = file.tensors();
    tensors
        .into_iter()
        .map(|(name, t)| (name, (t.dtype(), t.shape().to_vec(), t.data().to_vec())))
        .collect()
}

#[test]
fn views_are_written_with_their_own_shape_and_values() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    write(
        &path("a.s4w"),
        r#"{"dict":[
            ["slice",{"tensor":0,"shape":[3],"offset":2}],
            ["transposed",{"tensor":0,"shape":[3,2],"stride":[1,3]}],
            ["column",{"tensor":0,"shape":[6],"offset":1,"stride":[2]}],
            ["channels_last",{"tensor":0,"shape":[1,3,2,2],"stride":[12,1,6,3]}],
            ["blocks",{"tensor":0,"shape":[2,2],"offset":2,"stride":[6,1]}],
            ["expanded",{"tensor":0,"shape":[2,3],"offset":4,"stride":[0,0]}],
            ["wide",{"tensor":0,"dtype":"int16","shape":[2],"offset":1,"stride":[3]}],
            ["far",{"tensor":0,"dtype":"int16","shape":[1,2],"offset":1,"stride":[9223372036854775807,3]}],
            ["scalar",{"tensor":0,"shape":[],"offset":7}],
            ["none",{"tensor":0,"shape":[0,9]}],
            ["tied",{"same":0}],
            ["model",{"odict":[["tied",{"tensor":0,"shape":[3],"offset":2,"grad":true}]]}],
            ["model.n",{"tensor":1}],
            ["model\nn",[{"tensor":1,"dtype":"uint8","shape":[2]}]]
        ]}"#,
    );
    let back = path("b.safetensors");
    let out = s4w(&["decompress", &path("a.s4w"), &back]);
    assert!(out.status.success(), "{}", said(&out));
    assert!(said(&out).contains("left out: 2 tensors that share their values"), "{}", said(&out));
    let u8s = |shape: &[usize], values: &[u8]| (Dtype::U8, shape.to_vec(), values.to_vec());
    let i16s = |shape: &[usize], values: &[u8]| (Dtype::I16, shape.to_vec(), values.to_vec());
    let expected: Found = [
        ("slice", u8s(&[3], &[2, 3, 4])),
        ("transposed", u8s(&[3, 2], &[0, 3, 1, 4, 2, 5])),
        ("column", u8s(&[6], &[1, 3, 5, 7, 9, 11])),
        ("channels_last", u8s(&[1, 3, 2, 2], &[0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11])),
        ("blocks", u8s(&[2, 2], &[2, 3, 8, 9])),
        ("expanded", u8s(&[2, 3], &[4; 6])),
        ("wide", i16s(&[2], &[2, 3, 8, 9])),
        ("far", i16s(&[1, 2], &[2, 3, 8, 9])),
        ("scalar", u8s(&[], &[7])),
        ("none", u8s(&[0, 9], &[])),
        ("model.n", i16s(&[4], &[1, 0, 254, 255, 3, 0, 252, 255])),
        ("model\nn.0", u8s(&[2], &[1, 0])),
    ]
    .map(|(name, tensor)| (name.to_owned(), tensor))
    .into();
    assert_eq!(read(&back), expected);
    // The names of tensors that are the same as others stay, where safetensors' own `save_model` has them.
    let bytes = std::fs::read(&back).unwrap();
    let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let metadata = header.metadata().clone().expect("there is some");
    assert_eq!((&*metadata["tied"], &*metadata["model.tied"]), ("slice", "slice"));
}

#[test]
fn what_has_no_array_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let refused = |root: &str, code: i32, what: &str| {
        let back = path("b.safetensors");
        write(&path("a.s4w"), root);
        let out = s4w(&["decompress", &path("a.s4w"), &back, "-f"]);
        assert_eq!(out.status.code(), Some(code), "{}", said(&out));
        assert!(said(&out).contains(what), "{}", said(&out));
        assert!(!Path::new(&back).exists());
    };
    let a = |node: &str| format!(r#"{{"dict":[["a",{{"tensor":0,{node}}}]]}}"#);
    refused(&a(r#""shape":[1048576,1048576],"stride":[0,0]"#), 4, "repeat what is stored");
    refused(&a(r#""dtype":"int4","shape":[1]"#), 4, "`a` has dtype int4");
    refused(&a(r#""dtype":"bytes""#), 4, "`a` has dtype bytes");
    refused(&a(r#""shape":[13]"#), 1, "outside of the 12 stored bytes");
    refused(
        &a(r#""shape":[2,2],"stride":[9223372036854775807,9223372036854775807]"#),
        1,
        "outside",
    );
    refused(&a(r#""shape":[1],"stride":[]"#), 1, "outside");
    refused(r#"[{"tensor":2}]"#, 1, "tensor 2, which does not exist");
    refused(r#"{"dict":[["__metadata__",{"tensor":0}]]}"#, 4, "`__metadata__`");
    write(&path("a.s4w"), r#"[{"tensor":1}]"#);
    let out = s4w(&["decompress", &path("a.s4w"), &path("c.safetensors")]);
    assert!(out.status.success() && said(&out).contains("1 tensor not in the saved object"));
}
