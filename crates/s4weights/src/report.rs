//! Reports on saves, and on the content of files.

use std::collections::{BTreeMap, HashMap};

use s4_format::{CodecId, DType, LayoutId, Plan, ResidualId, StreamEntry};
use serde::Serialize;

/// Totals of all streams of one plane that were coded the same way.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StreamTotal {
    /// Values whose plane this is.
    pub values: u64,
    /// Bytes of the streams.
    pub bytes: u64,
    /// Bits for each value.
    pub bits_per_value: f64,
}

/// The statistics of a save.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Report {
    /// Tensors written.
    pub tensors: u64,
    /// Bytes of their values.
    pub bytes_in: u64,
    /// Bytes of the file.
    pub bytes_out: u64,
    /// Seconds from creation to publication.
    pub seconds: f64,
    /// BLAKE3 of the manifest, in hexadecimal: the identity of the checkpoint.
    pub digest: String,
    /// Totals by layout, plane and codec, such as `fields/exponent/rans8`; for predicted values
    /// with the residual in front, such as `xor/fields/exponent/rans8`.
    pub streams: BTreeMap<String, StreamTotal>,
}

/// The name of a plane.
pub(crate) fn plane_name(layout: LayoutId, plane: usize) -> String {
    let names: &[&str] = match layout {
        LayoutId::FIELDS => &["exponent", "mantissa+sign", "low+sign"],
        LayoutId::FIELDS_SIGN => &["sign", "exponent", "mantissa", "low"],
        LayoutId::TOKEN => &["token", "bits"],
        LayoutId::WHOLE => &["values"],
        _ => &[],
    };
    names.get(plane).map_or_else(|| format!("byte{plane}"), |n| (*n).to_owned())
}

/// Adds up streams: values and bytes of those that were coded the same way.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    plain: Option<(u64, u64)>,
    coded: HashMap<Coded, (u64, u64)>,
}

/// The key of a total. Names are made from it later, so that they do not slow down the writing thread, which counts
/// the chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Coded {
    /// The residual of predicted values.
    residual: Option<ResidualId>,
    layout: LayoutId,
    plane: usize,
    codec: CodecId,
    param: u8,
}

impl Totals {
    pub(crate) fn plain(&mut self, values: u64, bytes: u64) {
        add(self.plain.get_or_insert_default(), values, bytes);
    }

    pub(crate) fn chunk(&mut self, plan: &Plan, values: u64, streams: &[StreamEntry]) {
        let residual = (!plan.is_direct()).then_some(plan.residual);
        for (plane, s) in streams.iter().enumerate() {
            let param = if has_param(s.codec) { s.param } else { 0 };
            let coded = Coded { residual, layout: plan.layout, plane, codec: s.codec, param };
            add(self.coded.entry(coded).or_default(), values, s.len.into());
        }
    }

    pub(crate) fn finish(self) -> BTreeMap<String, StreamTotal> {
        let total = |(values, bytes): (u64, u64)| StreamTotal {
            values,
            bytes,
            bits_per_value: bytes as f64 * 8.0 / values.max(1) as f64,
        };
        let coded = self.coded.into_iter().map(|(coded, t)| (coded.name(), total(t)));
        coded.chain(self.plain.map(|t| ("plain".into(), total(t)))).collect()
    }
}

fn add(to: &mut (u64, u64), values: u64, bytes: u64) {
    to.0 += values;
    to.1 += bytes;
}

impl Coded {
    fn name(&self) -> String {
        let Self { residual, layout, plane, codec, param } = *self;
        let residual = residual.map(|r| format!("{r}/")).unwrap_or_default();
        format!("{residual}{layout}/{}/{}", plane_name(layout, plane), codec_name(codec, param))
    }
}

/// Whether a codec's parameter means more than how its stream is split.
fn has_param(codec: CodecId) -> bool {
    matches!(codec, CodecId::RANS | CodecId::BITS)
}

fn codec_name(codec: CodecId, param: u8) -> String {
    match has_param(codec) {
        true => format!("{codec}{param}"),
        false => codec.to_string(),
    }
}

/// One plane of a tensor.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PlaneReport {
    /// The name of the plane.
    pub plane: String,
    /// Codecs of its streams.
    pub codecs: Vec<String>,
    /// Bytes of its streams.
    pub bytes: u64,
    /// Bits for each value.
    pub bits_per_value: f64,
}

/// One tensor of a file.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TensorReport {
    /// Its name.
    pub name: String,
    /// Type of its elements.
    pub dtype: DType,
    /// Its dimensions.
    pub shape: Vec<u64>,
    /// Bytes of its values.
    pub bytes: u64,
    /// Bytes of its chunks, and of its tables and offsets; `None` if it shares a chunk with other small tensors.
    pub stored: Option<u64>,
    /// Predictor, residual and layout.
    pub plan: String,
    /// Its planes, if they were asked for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub planes: Vec<PlaneReport>,
}

/// A description of the content of a file.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Inspection {
    /// Version of the format.
    pub format: String,
    /// Program that wrote it.
    pub writer: String,
    /// Preset that it was written with.
    pub preset: String,
    /// The form of the saved object: `tensors`, `tree` or `pickle`.
    pub form: s4_format::manifest::Form,
    /// BLAKE3 of the manifest.
    pub digest: String,
    /// Bytes of the file, and of the objects that belong to it.
    pub file_bytes: u64,
    /// Bytes of all tensors' values.
    pub bytes: u64,
    /// `bytes / file_bytes`.
    pub ratio: f64,
    /// Free text from whoever saved it.
    pub metadata: BTreeMap<String, String>,
    /// BLAKE3 of the parent's manifest, if it is a delta.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// Checkpoints from this one down to its base, both counted.
    pub chain: u32,
    /// Closed codecs that reading needs, each with the major version of its vendor's library, such
    /// as `nvcomp-ans 6`.
    pub closed_codecs: Vec<String>,
    /// The tensors.
    pub tensors: Vec<TensorReport>,
}

/// The statistics of a verification.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Verification {
    /// Tensors decoded.
    pub tensors: u64,
    /// Chunks decoded; the checksums of each were compared before and after.
    pub chunks: u64,
    /// Bytes of values.
    pub bytes: u64,
    /// Objects and sections whose BLAKE3 was compared.
    pub hashes: u64,
}
