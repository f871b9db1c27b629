//! What a client needs for its handshakes.
//!
//! Promises: read-only after it is made, shared by all threads; the server's certificate has to be
//! of an authority of the files and to name the host.

use std::io::{Read, Write};
use std::sync::Arc;

use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection};

use crate::pem;
use crate::source::{Side, Source, SourceError, wrong};
use crate::stream::{StreamError, TlsStream};

/// The authorities that a client trusts, the name that the server must have, and the client's own
/// certificate, if there is one.
#[derive(Clone, Debug)]
pub struct ClientTls {
    config: Arc<ClientConfig>,
    host: ServerName<'static>,
}

impl ClientTls {
    /// Reads the files. Blocks for that.
    ///
    /// * `host`: a name, or an address without brackets, that the server's certificate must have.
    ///
    /// Errors: files that are missing, cannot be read or do not belong together; a `host` that no
    /// certificate can have.
    pub fn open(source: &Source, host: &str) -> Result<ClientTls, SourceError> {
        let Ok(name) = ServerName::try_from(host.to_owned()) else {
            return wrong(format!("'{host}' is no name that a certificate can have"));
        };
        let files = source.read(Side::Client)?;
        let Some(ca) = &files.ca else {
            let file = source.display_name("ca-cert.pem", "ca");
            return wrong(format!(
                "Unable to access credentials {file}: No such file or directory"
            ));
        };
        let provider = pem::provider();
        let cannot = |error: &dyn std::fmt::Display| {
            SourceError(format!("{} cannot be used: {error}", ca.path.display()))
        };
        let verifier =
            WebPkiServerVerifier::builder_with_provider(pem::roots(ca)?, Arc::clone(&provider))
                .with_crls(pem::revoked(files.crl.as_ref())?)
                .allow_unknown_revocation_status()
                .enforce_revocation_expiration()
                .build()
                .map_err(|error| cannot(&error))?;
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| cannot(&error))?
            .with_webpki_verifier(verifier);
        let mut config = match (&files.cert, &files.key) {
            (None, None) => config.with_no_client_auth(),
            (Some(cert), Some(key)) => {
                config.with_client_auth_cert(pem::chain(cert)?, pem::key(key)?).map_err(
                    |error| SourceError(format!("{} cannot be used: {error}", cert.path.display())),
                )?
            }
            (Some(cert), None) => {
                return wrong(format!("{} has no key beside it", cert.path.display()));
            }
            (None, Some(key)) => {
                return wrong(format!("{} has no certificate beside it", key.path.display()));
            }
        };
        config.resumption = Resumption::disabled();
        Ok(ClientTls { config: Arc::new(config), host: name })
    }

    /// Shakes hands over a stream that blocks.
    ///
    /// Errors: those of the stream; the server's certificate is not good, or it refuses this
    /// client.
    pub fn connect(&self, io: &mut (impl Read + Write)) -> Result<TlsStream, StreamError> {
        let connection = ClientConnection::new(Arc::clone(&self.config), self.host.clone())?;
        let stream = TlsStream::new(connection.into());
        stream.shake_blocking(io)?;
        Ok(stream)
    }
}
