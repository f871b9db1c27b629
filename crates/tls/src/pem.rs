//! What is in PEM files.
//!
//! Promises: a file without what it should hold is refused by its name. Control path.

use std::sync::Arc;

use rustls::RootCertStore;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};

use crate::source::{PemFile, SourceError, wrong};

/// The only cryptography that is linked.
pub(crate) fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn all<T: PemObject>(file: &PemFile, what: &str) -> Result<Vec<T>, SourceError> {
    let found: Result<Vec<T>, _> = T::pem_slice_iter(&file.bytes).collect();
    match found {
        Ok(found) if !found.is_empty() => Ok(found),
        Ok(_) => wrong(format!("{} holds no {what} in PEM", file.path.display())),
        Err(error) => wrong(format!("{} is no PEM file: {error}", file.path.display())),
    }
}

/// Authorities.
pub(crate) fn roots(file: &PemFile) -> Result<Arc<RootCertStore>, SourceError> {
    let mut roots = RootCertStore::empty();
    for certificate in all::<CertificateDer<'static>>(file, "certificate")? {
        roots.add(certificate).map_err(|error| {
            let path = file.path.display();
            SourceError(format!("{path} holds a certificate that cannot be used: {error}"))
        })?;
    }
    Ok(Arc::new(roots))
}

/// Lists of revoked certificates.
pub(crate) fn revoked(
    file: Option<&PemFile>,
) -> Result<Vec<CertificateRevocationListDer<'static>>, SourceError> {
    file.map_or(Ok(Vec::new()), |file| all(file, "list of revoked certificates"))
}

/// A certificate with those behind it.
pub(crate) fn chain(file: &PemFile) -> Result<Vec<CertificateDer<'static>>, SourceError> {
    all(file, "certificate")
}

/// A private key.
pub(crate) fn key(file: &PemFile) -> Result<PrivateKeyDer<'static>, SourceError> {
    let text = String::from_utf8_lossy(&file.bytes);
    if text.contains("ENCRYPTED") {
        return wrong(format!(
            "{} is encrypted, which is not supported: store it without a password, readable by \
             its owner only",
            file.path.display()
        ));
    }
    PrivateKeyDer::from_pem_slice(&file.bytes)
        .map_err(|_| SourceError(format!("{} holds no private key in PEM", file.path.display())))
}
