{{/* What several manifests have in common. */}}

{{- define "eaas.name" -}}
{{- if contains "eaas" .Release.Name }}{{ .Release.Name | trunc 40 }}{{ else }}{{ printf "%s-eaas" .Release.Name | trunc 40 }}{{ end -}}
{{- end }}

{{/* Labels that never change: what selectors use. Call with (list $ "role"). */}}
{{- define "eaas.selector" -}}
app.kubernetes.io/name: eaas
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "eaas.labels" -}}
{{ include "eaas.selector" . }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ printf "%s-%s" (index . 0).Chart.Name (index . 0).Chart.Version }}
{{- end }}

{{- define "eaas.router" -}}
{{ include "eaas.name" . }}-router:{{ .Values.router.port }}
{{- end }}

{{/* The head of every pod's spec. Call with (list $ "role" seconds-to-end). */}}
{{- define "eaas.pod" -}}
{{- $ := index . 0 }}{{ $role := index . 1 }}{{ $values := index $.Values $role -}}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ index . 2 }}
{{- with $.Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
# Copies of an expert lie on different servers; let those lie on different nodes where there are enough.
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{ include "eaas.selector" (list $ $role) | nindent 8 }}
{{- end }}

{{/* The head of every container. Call with (list $ "role"). */}}
{{- define "eaas.container" -}}
{{- $ := index . 0 }}{{ $role := index . 1 -}}
name: {{ $role }}
image: "{{ $.Values.image.repository }}:{{ $.Values.image.tag | default $.Chart.AppVersion }}"
imagePullPolicy: {{ $.Values.image.pullPolicy }}
env:
  - name: POD_IP
    valueFrom: {fieldRef: {fieldPath: status.podIP}}
  - name: NODE_NAME
    valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
{{- range $name, $value := (index $.Values $role).options }}
  - name: EAAS_{{ upper $role }}_{{ upper $name }}
    value: {{ kindIs "string" $value | ternary $value (kindIs "slice" $value | ternary (join "," $value) (toJson $value)) | quote }}
{{- end }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
resources: {{ toYaml (index $.Values $role).resources | nindent 2 }}
{{- end }}

{{/* Mounts and volumes that every pod has; the model where the role reads it. Call with (list $ "role"). */}}
{{- define "eaas.mounts" -}}
{{- $ := index . 0 }}{{ $role := index . 1 -}}
- {name: tls, mountPath: /tls, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- if and $.Values.model.volume (ne $role "router") }}
- {name: model, mountPath: {{ $.Values.model.path }}, readOnly: true}
{{- end }}
{{- range $.Values.models }}
{{- if and .volume (ne $role "router") }}
- {name: model-{{ include "eaas.slug" . }}, mountPath: {{ .path }}, readOnly: true}
{{- end }}
{{- end }}
{{- end }}

{{- define "eaas.volumes" -}}
{{- $ := index . 0 }}{{ $role := index . 1 -}}
- name: tls
  secret: {secretName: {{ $.Values.tls.secretPrefix }}-{{ $role }}, defaultMode: 0440}
- name: tmp
  emptyDir: {}
{{- if and $.Values.model.volume (ne $role "router") }}
- name: model {{- toYaml $.Values.model.volume | nindent 2 }}
{{- end }}
{{- range $.Values.models }}
{{- if and .volume (ne $role "router") }}
- name: model-{{ include "eaas.slug" . }} {{- toYaml .volume | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}

{{/* Before a member ends, others do all of its work. Call with (list $ "role"). */}}
{{- define "eaas.retire" -}}
{{- $ := index . 0 }}{{ $role := index . 1 -}}
lifecycle:
  preStop:
    exec:
      command:
        - eaas
        - retire
        - {{ $role }}
        - --here
        - --wait
        - --longest-s={{ (index $.Values $role).drainSeconds }}
        - --router={{ include "eaas.router" $ }}
        - --tls-dir=/tls
{{- end }}

{{/* Arguments of every member. Call with (list $ "role" folder-of-its-model). */}}
{{- define "eaas.member" -}}
{{- $ := index . 0 }}{{ $role := index . 1 }}{{ $values := index $.Values $role -}}
- --router={{ include "eaas.router" $ }}
- --model={{ index . 2 }}
- --host=0.0.0.0
- --port={{ $values.port }}
- --tls-dir=/tls
- --log-format=json
{{- end }}

{{/* What names of objects end in and pods are labeled with, of a model's attention workers. Call with the model. */}}
{{- define "eaas.slug" -}}
{{ regexReplaceAll "[^a-z0-9]+" (lower (.name | default "")) "-" | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* How rows travel: nothing leaves a node unencrypted without a word for it. */}}
{{- define "eaas.transport" -}}
{{- if and (hasPrefix "nixl" .Values.transport) (not .Values.trustNetwork) -}}
{{- fail (printf "transport %s sends rows between nodes unencrypted: say --set trustNetwork=true where their network is private, or encrypted below (docs/security.md)" .Values.transport) -}}
{{- end -}}
- --transport={{ .Values.transport }}
{{- if .Values.trustNetwork }}
- --trust-network
{{- end }}
{{- end }}
