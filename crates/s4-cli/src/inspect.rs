//! What is in a file, as text.

use s4weights::Inspection;

use crate::visible::name;

/// A few lines about the file, then a line for each tensor.
pub(crate) fn table(i: &Inspection) -> String {
    let mut out = String::new();
    let mut line = |text: String| {
        out.push_str(&text);
        out.push('\n');
    };
    line(format!(
        "format    {}  ({}, preset {}, {:?})",
        i.format,
        name(&i.writer),
        i.preset,
        i.form
    ));
    line(format!("manifest  {}", i.digest));
    line(format!(
        "size      {} bytes for {} of values: ratio {:.4}",
        i.file_bytes, i.bytes, i.ratio
    ));
    for c in &i.closed_codecs {
        line(format!(
            "needs     {c}: a closed codec, readable only with that version of its vendor's library on \
             a GPU; run `s4w transcode` there to rewrite the file with open codecs"
        ));
    }
    for (k, v) in &i.metadata {
        line(format!("metadata  {} = {}", name(k), name(v)));
    }
    let names: Vec<String> = i.tensors.iter().map(|t| name(&t.name)).collect();
    let width = names.iter().map(|n| n.chars().count()).max().unwrap_or(0).min(60);
    for (t, shown) in i.tensors.iter().zip(&names) {
        let (stored, ratio) = match t.stored {
            Some(s) => (s.to_string(), format!("{:.4}", t.bytes as f64 / s.max(1) as f64)),
            None => ("-".into(), "-".into()),
        };
        let shape = t.shape.iter().map(u64::to_string).collect::<Vec<_>>().join("x");
        line(format!(
            "{:width$}  {:16} {:>16}  {:>12} -> {:>12}  {:>8}  {}",
            shown,
            t.dtype.name(),
            shape,
            t.bytes,
            stored,
            ratio,
            t.plan
        ));
        for p in &t.planes {
            line(format!(
                "{:width$}    {:14} {:8.4} bits  {}",
                "",
                p.plane,
                p.bits_per_value,
                p.codecs.join(", ")
            ));
        }
    }
    out.truncate(out.trim_end().len());
    out
}
