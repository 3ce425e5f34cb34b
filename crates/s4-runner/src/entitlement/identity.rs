//! The identity document of an EC2 instance, signed by AWS: it says which product's image the
//! instance was launched from.

use aws_lc_rs::digest::{SHA256, digest};
use aws_lc_rs::signature::{RSA_PKCS1_2048_8192_SHA256, UnparsedPublicKey};
use base64::Engine;
use cms::content_info::ContentInfo;
use cms::signed_data::SignedData;
use der::asn1::{ObjectIdentifier, OctetStringRef};
use der::{Decode, DecodePem, Encode};
use serde::Deserialize;

use super::{No, Settings, ber};
use crate::error::{Error, Result};
use crate::imds::Imds;

const DOCUMENT: &str = "/latest/dynamic/instance-identity/document";
const SIGNATURE: &str = "/latest/dynamic/instance-identity/rsa2048";
const INSTANCE: &str = "/latest/meta-data/instance-id";

const SIGNED_DATA: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.113549.1.7.2");
const MESSAGE_DIGEST: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.113549.1.9.4");
const ID_SHA256: ObjectIdentifier = ObjectIdentifier::new_unwrap("2.16.840.1.101.3.4.2.1");

/// The region's certificate, of which only the key is used.
pub(super) struct Certificate {
    key: Vec<u8>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    instance_id: String,
    marketplace_product_codes: Option<Vec<String>>,
}

impl Certificate {
    pub(super) fn read(settings: &Settings) -> Result<Self> {
        let bad = |what: String| Error::Config(format!("`entitlement`: {what}"));
        let path = settings.certificate.as_ref();
        let path = path.ok_or_else(|| bad("`certificate` is missing".into()))?;
        let pem = std::fs::read(path).map_err(|e| bad(format!("{}: {e}", path.display())))?;
        let certificate = x509_cert::Certificate::from_pem(pem)
            .map_err(|e| bad(format!("{}: not a certificate: {e}", path.display())))?;
        let key = certificate.tbs_certificate.subject_public_key_info.subject_public_key;
        Ok(Self { key: key.raw_bytes().to_vec() })
    }

    /// The document that a signature vouches for.
    fn verify(&self, signature: &str) -> std::result::Result<Vec<u8>, No> {
        let bad = |what: &str| No::new("bad_signature", format!("the identity document: {what}"));
        let text: String = signature.split_whitespace().collect();
        let bytes = base64::engine::general_purpose::STANDARD.decode(text);
        let bytes = bytes.map_err(|_| bad("its signature is not base64"))?;
        // AWS sends indefinite lengths, which DER forbids.
        let bytes = ber::to_der(&bytes).ok_or_else(|| bad("its signature is not PKCS7"))?;
        let parse = |_| bad("its signature is not PKCS7");
        let info = ContentInfo::from_der(&bytes).map_err(parse)?;
        if info.content_type != SIGNED_DATA {
            return Err(bad("its signature is not PKCS7 signed data"));
        }
        let signed: SignedData = info.content.decode_as().map_err(parse)?;
        let content = signed.encap_content_info.econtent.ok_or_else(|| bad("it is empty"))?;
        let content = content.decode_as::<OctetStringRef<'_>>().map_err(parse)?.as_bytes().to_vec();
        let [signer] = signed.signer_infos.0.as_slice() else {
            return Err(bad("it does not have exactly one signer"));
        };
        if signer.digest_alg.oid != ID_SHA256 {
            return Err(bad("its signature does not use SHA-256"));
        }
        let message = match &signer.signed_attrs {
            None => content.clone(),
            Some(attributes) => {
                let mut digests = attributes.iter().filter(|a| a.oid == MESSAGE_DIGEST);
                let (Some(attribute), None) = (digests.next(), digests.next()) else {
                    return Err(bad("its signature names no digest"));
                };
                let [value] = attribute.values.as_slice() else {
                    return Err(bad("its signature names no digest"));
                };
                let named = value.decode_as::<OctetStringRef<'_>>().map_err(parse)?;
                if named.as_bytes() != digest(&SHA256, &content).as_ref() {
                    return Err(bad("it does not match its signature"));
                }
                attributes.to_der().map_err(parse)?
            }
        };
        let key = UnparsedPublicKey::new(&RSA_PKCS1_2048_8192_SHA256, &self.key);
        let signed = key.verify(&message, signer.signature.as_bytes());
        signed.map_err(|_| bad("it was not signed with the certificate's key")).map(|()| content)
    }
}

/// Asks once.
pub(super) async fn ask(
    settings: &Settings,
    certificate: &Certificate,
    imds: &Imds,
) -> std::result::Result<(), No> {
    let document = imds.get(DOCUMENT).await?;
    let signed = certificate.verify(&imds.get(SIGNATURE).await?)?;
    if signed != document.as_bytes() {
        return Err(No::new("bad_signature", "the signature belongs to another identity document"));
    }
    let document: Document = serde_json::from_slice(&signed)
        .map_err(|_| No::new("malformed_reply", "the response is not an identity document"))?;
    if document.instance_id != imds.get(INSTANCE).await? {
        return Err(No::new("wrong_instance", "the identity document belongs to another instance"));
    }
    let codes = document.marketplace_product_codes.unwrap_or_default();
    match codes.contains(&settings.product_code) {
        true => Ok(()),
        false => Err(No::new("wrong_product", "the instance was not launched from this product")),
    }
}
