//! Who may connect, from a request to what the export takes.
//!
//! Promises: keys and certificates are read here, before the process is confined; users and groups
//! are looked up here.

use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::run_as;
use ringdisk_daemon::sockets;
use ringdisk_nbd::{AllowList, AllowedUsers, ServerTls, TlsOptions};

use super::request::AccessRequest;

/// Who may connect.
#[derive(Debug)]
pub(crate) struct Access {
    pub(crate) tls: Option<TlsOptions>,
    pub(crate) users: Option<AllowedUsers>,
}

/// Errors: files that are missing or wrong, users and groups that do not exist.
pub(crate) fn access(request: &AccessRequest) -> Result<Access, Failure> {
    Ok(Access { tls: tls(request)?, users: users(request)? })
}

fn tls(request: &AccessRequest) -> Result<Option<TlsOptions>, Failure> {
    let Some(source) = &request.tls else { return Ok(None) };
    let named = (!request.names.is_empty()).then(|| AllowList::exact(request.names.clone()));
    let allow = request.rules.clone().or(named);
    let server = ServerTls::open(source, request.verify, allow)
        .map_err(|error| Failure::new(Exit::Usage, error.to_string()))?;
    Ok(Some(TlsOptions { server, required: !request.is_tls_optional }))
}

fn users(request: &AccessRequest) -> Result<Option<AllowedUsers>, Failure> {
    if request.users.is_empty() && request.groups.is_empty() {
        return Ok(None);
    }
    let mut allowed = AllowedUsers::default();
    for user in &request.users {
        allowed.users.push(run_as::number_of("--allow-user", user)?);
    }
    for group in &request.groups {
        let number = sockets::group(group).map_err(|failure| failure.context("--allow-group"))?;
        allowed.groups.push(number);
        // A process need not have the groups that its user is a member of.
        allowed.users.extend(run_as::members_of(number));
    }
    Ok(Some(allowed))
}
